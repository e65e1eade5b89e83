// Shows the KV pages of each tier: those of running sequences and those of the prefix cache.
import { element } from "../shared/element.js";
import { compact, count, percent } from "../shared/format.js";
import { BarRow, fitRows } from "../charts/bar_row.js";
import { LineChart } from "../charts/line_chart.js";
import { Panel } from "./panel.js";
import { whoHasThePages } from "./rank_phase.js";

export class KvPanel {
  #rows = [];

  constructor() {
    this.panel = new Panel({ id: "kv", title: "KV pages" });
    this.tiers = element("div", {});
    const series = [{ name: "pages in use", variable: "series-1" }];
    this.chart = new LineChart({ label: "KV pages in use over five minutes", series, format: compact, height: 118 });
    this.panel.body.append(this.tiers, element("p", { class: "group" }, "In use, 5 minutes"), this.chart.node);
  }

  update({ kv, history, now, ranks }) {
    const away = whoHasThePages({ kv, ranks });
    this.panel.sayInstead(away && `No KV pages: ${away}.`);
    const hits = kv.prefix_hit_rate === null ? "no prompt looked up yet" : `prefix cache hits ${percent(kv.prefix_hit_rate)}`;
    this.panel.note(`${kv.page_tokens} tokens per page, ${hits}`);
    const lines = kv.tiers.flatMap((tier) => [
      { tier, name: `${tier.name}, in use`, number: tier.used },
      { tier, name: `${tier.name}, prefix cache`, number: tier.cached ?? 0 }, // including pages that sequences also use
    ]);
    fitRows(this.tiers, this.#rows, lines.length);
    lines.forEach(({ tier, name, number }, i) => this.#rows[i].update({
      name,
      share: number / Math.max(1, tier.pages),
      figure: `${compact(number)} of ${compact(tier.pages)}`,
      label: `${name}: ${count(number)} of ${count(tier.pages)} pages`,
    }));
    this.chart.update({ t: history.t, now, values: [history.kv_used] });
  }
}
