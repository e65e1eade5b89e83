// Shows the KV pages of running sequences, of the prefix cache and of the store behind it, and where
// the keys and values of prompts came from.
import { element } from "../shared/element.js";
import { bytes, compact, count, percent } from "../shared/format.js";
import { BarRow, fitRows } from "../charts/bar_row.js";
import { LineChart } from "../charts/line_chart.js";
import { Panel } from "./panel.js";
import { whoHasThePages } from "./rank_phase.js";

export class KvPanel {
  #rows = [];
  #sourceRows = [];

  constructor() {
    this.panel = new Panel({ id: "kv", title: "KV pages" });
    this.tiers = element("div", {});
    const series = [{ name: "pages in use", variable: "series-1" }];
    this.chart = new LineChart({ label: "KV pages in use over five minutes", series, format: compact, height: 118 });
    this.sources = element("div", {});
    const title = element("p", { class: "group" }, "Prompt tokens since the start");
    this.panel.body.append(this.tiers, title, this.sources, element("p", { class: "group" }, "In use, 5 minutes"), this.chart.node);
  }

  update({ kv, history, now, ranks }) {
    const away = whoHasThePages({ kv, ranks });
    this.panel.sayInstead(away && `No KV pages: ${away}.`);
    const hits = kv.prefix_hit_rate === null ? "no prompt looked up yet" : `prefix cache hits ${percent(kv.prefix_hit_rate)}`;
    this.panel.note(`${kv.page_tokens} tokens per page, ${hits}${windowNote(kv.window)}`);
    const lines = kv.tiers.flatMap((tier) => [
      pagesLine(`${tier.name}, in use`, tier.used, tier.pages),
      pagesLine(`${tier.name}, cached`, tier.cached ?? 0, tier.pages), // including pages that sequences also use
    ]);
    for (let store = kv.store; store !== null; store = store.memory) lines.push(storeLine(store));
    show(this.tiers, this.#rows, lines);
    show(this.sources, this.#sourceRows, sourceLines(kv));
    this.chart.update({ t: history.t, now, values: [history.kv_used] });
  }
}

function windowNote(window) {
  if (window === null) return "";
  return `, ${count(window.dropped_pages)} pages given back by ${count(window.requests)} requests with kv_window`;
}

function show(host, rows, lines) {
  fitRows(host, rows, lines.length);
  lines.forEach((line, i) => rows[i].update(line));
}

function pagesLine(name, number, pages) {
  return {
    name,
    share: number / Math.max(1, pages),
    figure: `${compact(number)} of ${compact(pages)}`,
    label: `${name}: ${count(number)} of ${count(pages)} pages`,
  };
}

function storeLine(store) {
  const name = store.state === "" ? `${store.name}, stored` : `${store.name}, ${store.state}`;
  return {
    name,
    share: store.bytes / Math.max(1, store.capacity_bytes),
    figure: bytes(store.bytes),
    label: `${name}: ${bytes(store.bytes)} of ${bytes(store.capacity_bytes)}, ${count(store.pages)} pages`,
  };
}

function sourceLines({ store, prompt_tokens: tokens }) {
  const sources = [["prefix cache", tokens.prefix_cache], ["computed", tokens.computed]];
  if (store !== null) sources.splice(1, 0, [store.name, tokens.store]);
  const all = sources.reduce((sum, [, number]) => sum + number, 0);
  return sources.map(([name, number]) => ({
    name,
    share: number / Math.max(1, all),
    figure: compact(number),
    label: `${name}: ${count(number)} of ${count(all)} prompt tokens`,
  }));
}
