// Shows the latest events: newest first, at most 200.
import { element } from "../shared/element.js";
import { clock } from "../shared/format.js";
import { Panel } from "./panel.js";

const MAX_EVENTS = 200;
const TONES = {
  rank_lost: "bad", rebalance_failed: "bad", engine_died: "bad", outage: "bad", predictor_off: "warn", overload: "warn",
  draining: "warn", rank_back: "good", outage_over: "good", started: "good", rebalanced: "good", predictor_on: "good",
  cell_added: "", cell_serves: "good", cell_back: "good", cell_drains: "warn", cell_leaves: "warn", cell_stops: "warn",
  cell_gone: "warn", cell_failed: "bad", cells_scaled: "",
};

export class EventsPanel {
  #seen = new Set();

  constructor() {
    this.panel = new Panel({ id: "events", title: "Events" });
    this.list = element("ol", { class: "events", tabindex: 0, "aria-label": "Events, newest first" });
    this.panel.body.append(this.list);
    this.panel.sayInstead("Nothing has happened yet.");
  }

  update({ events }, isRestarted) {
    if (isRestarted) this.#seen.clear(); // a new process numbers events from 1 again; old lines stay
    for (const event of events) {
      if (this.#seen.has(event.seq)) continue;
      this.#seen.add(event.seq);
      this.list.prepend(lineOf(event));
    }
    while (this.list.children.length > MAX_EVENTS) this.list.lastChild.remove();
    if (this.list.children.length) this.panel.sayInstead(null);
  }
}

function lineOf({ time, kind, text }) {
  const when = element("time", { datetime: new Date(time * 1000).toISOString() }, clock(time));
  const badge = element("span", { class: "badge", "data-kind": TONES[kind] ?? "" }, kind.replaceAll("_", " "));
  return element("li", {}, when, element("span", {}, badge), element("span", { class: "text" }, text));
}
