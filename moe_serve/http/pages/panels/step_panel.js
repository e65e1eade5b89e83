// Shows the ping-pong timeline of the last step. The hold button freezes one step.
import { element, setText } from "../shared/element.js";
import { milliseconds, percent, plural } from "../shared/format.js";
import { Panel } from "./panel.js";
import { familyOf, kindColour, StepTimeline } from "../charts/step_timeline.js";

const NAMES = {
  attention: "attention", experts: "experts", shared: "shared expert", dispatch: "dispatch", combine: "combine",
  sample: "logits, sample", other: "other", wait: "waiting",
};

export class StepPanel {
  #isHeld = false;
  #families = "";

  constructor() {
    this.hold = element("button", { type: "button", class: "quiet", "aria-pressed": "false", click: () => this.#toggle() }, "Hold");
    this.zoom = element("select", { id: "step-zoom", change: () => this.timeline.zoomTo(Number(this.zoom.value)) },
      ...[1, 2, 4, 8, 16].map((factor) => element("option", { value: factor }, `${factor}×`)));
    const label = element("label", { for: "step-zoom", class: "muted" }, "Zoom");
    this.panel = new Panel({ id: "step", title: "Last step", size: "wide", tools: [label, this.zoom, this.hold] });
    this.summary = element("p", { class: "summary" });
    this.timeline = new StepTimeline();
    this.legend = element("div", { class: "legend" });
    this.panel.body.append(this.summary, this.timeline.node, this.legend);
    document.addEventListener("themechange", () => this.#paintLegend());
  }

  update({ step, server }) {
    if (this.#isHeld) return;
    if (step === null) {
      this.panel.note("");
      this.panel.sayInstead(server.layout === "one process"
        ? "No stages: one process runs attention and experts in turn, and does not record them."
        : "No step yet: the ranks report their times after a step.");
      return;
    }
    this.panel.sayInstead(null);
    const reason = step.why ? ` (${step.why})` : "";
    this.panel.note(`step ${step.number}: ${milliseconds(step.duration_ms)}, ${plural(step.micro_batches, "micro-batch", "micro-batches")}${reason}`);
    setText(this.summary, step.tracks.map((track) => `${track.name} ${percent(busyShare(track, step))} busy`).join(" · "));
    this.timeline.update(step);
    this.#listKinds(step);
  }

  #toggle() {
    this.#isHeld = !this.#isHeld;
    this.hold.setAttribute("aria-pressed", `${this.#isHeld}`);
    setText(this.hold, this.#isHeld ? "Go on" : "Hold");
  }

  #listKinds({ tracks }) {
    const present = new Set(tracks.flatMap(({ spans }) => spans.map(({ kind }) => familyOf(kind))));
    const families = Object.keys(NAMES).filter((family) => present.has(family));
    if (families.join() === this.#families) return;
    this.#families = families.join();
    this.legend.replaceChildren(...families.map((family) =>
      element("span", { class: "key" }, element("i", { class: "swatch", "data-family": family }), NAMES[family])),
      element("span", {}, "the number is the micro-batch"));
    this.#paintLegend();
  }

  #paintLegend() {
    for (const swatch of this.legend.querySelectorAll("[data-family]")) {
      swatch.style.background = kindColour(swatch.dataset.family);
    }
  }
}

/** The share of the step's time that is not waiting. */
export function busyShare({ spans }, { duration_ms: durationMs }) {
  const busy = spans.filter(({ kind }) => familyOf(kind) !== "wait");
  const total = busy.reduce((sum, { start_ms: start, end_ms: end }) => sum + end - start, 0);
  return Math.min(1, total / Math.max(durationMs, 1e-6));
}
