// Shows each rank's load beside an even share of its pool.
import { element, setText } from "../shared/element.js";
import { percent, plural, times } from "../shared/format.js";
import { BarRow, fitRows } from "../charts/bar_row.js";
import { Panel } from "./panel.js";
import { isAway } from "./rank_phase.js";

const POOLS = [["expert", "Expert ranks: share of the rows"], ["attention", "Attention ranks: share of the sequences"]];

export class RanksPanel {
  constructor() {
    this.panel = new Panel({ id: "ranks", title: "Ranks" });
    this.cells = { heading: element("p", { class: "group" }, "Cells: share of the KV pages in use"), host: element("div", {}), rows: [] };
    this.scaling = element("p", { class: "muted" });
    this.panel.body.append(this.cells.heading, this.cells.host, this.scaling);
    this.pools = POOLS.map(([kind, title]) => {
      const heading = element("p", { class: "group" }, title);
      const host = element("div", {});
      this.panel.body.append(heading, host);
      return { kind, heading, host, rows: [] };
    });
  }

  update({ ranks, cells = [], autoscale = null, server }) {
    if (ranks.length === 0) {
      this.panel.note("");
      this.panel.sayInstead(`No ranks: this server runs in ${server.layout}.`);
      return;
    }
    this.panel.sayInstead(null);
    const away = ranks.filter(isAway);
    this.panel.note(away.length ? `${away.length} of ${ranks.length} not serving` : server.layout);
    this.cells.heading.hidden = cells.length === 0;
    fitRows(this.cells.host, this.cells.rows, cells.length, () => new CellRow());
    cells.forEach((cell, i) => this.cells.rows[i].update(cell));
    this.scaling.hidden = autoscale === null;
    setText(this.scaling, autoscale === null ? "" : scalingText(autoscale));
    for (const pool of this.pools) {
      const members = ranks.filter(({ kind }) => kind === pool.kind);
      pool.heading.hidden = members.length === 0;
      fitRows(pool.host, pool.rows, members.length, () => new RankRow());
      const scale = Math.max(1 / Math.max(1, members.length), ...members.map(({ load }) => load ?? 0)) * 1.15;
      members.forEach((rank, i) => pool.rows[i].update(rank, members.length, Math.min(1, scale)));
    }
  }
}

function scalingText({ policy, wanted, last }) {
  const counts = Object.entries(wanted).map(([role, count]) => `${count} ${role}`).join(", ");
  return [`Autoscaling by ${policy} wants ${counts || "no change"}`, last].filter((part) => part).join(" · ");
}

class CellRow {
  constructor() {
    this.row = new BarRow();
    this.badge = element("span", { class: "badge" });
    this.more = element("span", { class: "muted number" });
    this.node = element("div", {}, this.row.node, element("div", { class: "rank-line" }, this.badge, this.more));
  }

  update({ name, role, ranks, running, waiting, kv_used, outage_s, state, note }) {
    this.row.update({ name, share: kv_used, mark: null, figure: percent(kv_used), label: `${name}: ${percent(kv_used)} of its KV pages are in use` });
    const isServing = state === "serving";
    setText(this.badge, outage_s > 0 ? "away" : isServing ? role : state);
    this.badge.dataset.kind = outage_s > 0 || !isServing ? "bad" : "good";
    const work = `${running} running · ${waiting} waiting`;
    setText(this.more, [ranks, isServing ? "" : role, work, note].filter((part) => part).join(" · "));
  }
}

class RankRow {
  constructor() {
    this.row = new BarRow();
    this.badge = element("span", { class: "badge" });
    this.more = element("span", { class: "muted number" });
    this.node = element("div", {}, this.row.node, element("div", { class: "rank-line" }, this.badge, this.more));
  }

  /** The bar ends at `scale`; the mark is the even share. */
  update({ name, phase, load, busy, restarts }, numMembers, scale) {
    const even = 1 / numMembers;
    const none = isAway({ phase }) ? "away" : "nothing to do";
    const text = load === null ? none : `${percent(load)} · ${times(load / even)}`;
    this.row.update({
      name,
      share: (load ?? 0) / scale,
      mark: numMembers > 1 ? even / scale : null,
      figure: text,
      label: `${name}: ${load === null ? none : `${percent(load)} of its pool's load, ${times(load / even)} an even share`}`,
    });
    setText(this.badge, phase);
    this.badge.dataset.kind = isAway({ phase }) ? "bad" : "good";
    const isBusy = busy === null || busy === undefined ? "" : `busy ${percent(busy)}`;
    const back = restarts ? plural(restarts, "restart") : "";
    setText(this.more, [isBusy, back].filter((part) => part).join(" · "));
  }
}
