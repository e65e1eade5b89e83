// Shows the adapters: their size, their requests, and whether their weights are in memory.
import { element, setText } from "../shared/element.js";
import { bytes, count, plural } from "../shared/format.js";
import { fitRows } from "../charts/bar_row.js";
import { Panel } from "./panel.js";

const KINDS = { lora: "LoRA", esft: "ESFT", bitdelta: "BitDelta" };
const COLUMNS = [
  ["Adapter", "the name that requests give as their model"],
  ["State", "pinned: never dropped; dropped: read again when a request names it"],
  ["Running", "sequences that have begun to answer"],
  ["Waiting", "sequences without a token yet"],
  ["Memory", "bytes of its weights; on ranks, on the one that holds the most"],
  ["Kind", "LoRA with its largest rank, ESFT or BitDelta"],
  ["Version", "first digits of the content's SHA-256"],
];

export class AdaptersPanel {
  #rows = [];

  constructor() {
    this.panel = new Panel({ id: "adapters", title: "Adapters", size: "wide" });
    this.panel.node.hidden = true; // until a state has adapters
    const heads = COLUMNS.map(([name, title]) => element("th", { scope: "col", title }, name));
    this.body = element("tbody", {});
    this.table = element("table", { class: "tier-table" }, element("thead", {}, element("tr", {}, ...heads)), this.body);
    this.more = element("p", { class: "muted small" });
    this.panel.body.append(element("div", { class: "scroller" }, this.table), this.more);
  }

  update({ adapters }) {
    const isThere = adapters !== null && adapters !== undefined;
    this.panel.node.hidden = !isThere;
    if (!isThere) return;
    this.panel.note(noteOf(adapters));
    const shown = adapters.adapters;
    this.panel.sayInstead(shown.length === 0 ? "No adapters are loaded." : null);
    fitRows(this.body, this.#rows, shown.length, () => new AdapterRow());
    shown.forEach((adapter, i) => this.#rows[i].update(adapter));
    const rest = adapters.number - shown.length;
    this.more.hidden = rest <= 0;
    setText(this.more, `and ${plural(rest, "more adapter")}`);
  }
}

class AdapterRow {
  constructor() {
    this.name = element("th", { scope: "row", class: "adapter-name" });
    this.cells = COLUMNS.slice(1).map(() => element("td", {}));
    this.badge = element("span", { class: "badge" });
    this.cells[0].append(this.badge);
    this.node = element("tr", {}, this.name, ...this.cells);
  }

  update({ name, kind, rank, version, bytes: size, running, waiting, is_pinned: isPinned, state }) {
    const [, runningCell, waitingCell, sizeCell, kindCell, versionCell] = this.cells;
    setText(this.name, name);
    this.name.title = name;
    setText(kindCell, `${KINDS[kind] ?? kind}${rank > 0 ? ` r ${rank}` : ""}`);
    setText(versionCell, version);
    setText(sizeCell, bytes(size));
    setText(runningCell, count(running));
    setText(waitingCell, count(waiting));
    const isHere = state === "in memory";
    this.badge.dataset.kind = isHere ? "good" : "warn";
    setText(this.badge, isHere && isPinned ? "pinned" : state);
  }
}

function noteOf({ number, in_memory_bytes: used, memory_bytes: limit, pinned_bytes: pinned, evictions_total: evictions }) {
  const room = limit === null ? bytes(used) : `${bytes(used)} of ${bytes(limit)}`;
  const parts = [plural(number, "name"), `${room} in memory`];
  if (pinned > 0) parts.push(`${bytes(pinned)} pinned`);
  if (evictions > 0) parts.push(`dropped ${plural(evictions, "time")}`);
  return parts.join(", ");
}
