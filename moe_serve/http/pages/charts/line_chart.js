// Lines over the last five minutes, drawn as SVG: gaps for missing numbers, and a reading at
// the position of the pointer or the keyboard.
import { element, setText, svgElement } from "../shared/element.js";
import { clock } from "../shared/format.js";
import { announce, hideTooltip, showTooltip } from "../shared/tooltip.js";

const WINDOW_S = 300;
const MARGIN = { top: 8, right: 8, bottom: 20, left: 48 };

export class LineChart {
  #data = { t: [], now: 0, values: [] };
  #at = null; // the position of the reading, an index into t
  #width = 0;

  /** `series`: [{name, variable}], a colour variable each; `format` writes a value. */
  constructor({ label, series, format, height = 132 }) {
    this.label = label;
    this.series = series;
    this.format = format;
    this.height = height;
    this.svg = svgElement("svg", { height, "aria-hidden": "true" });
    this.node = element("div", {
      class: "chart", tabindex: 0, role: "img", "aria-label": label,
      pointermove: (event) => this.#point(event),
      pointerleave: () => this.#read(null),
      blur: () => this.#read(null),
      keydown: (event) => this.#step(event),
    }, this.svg);
    this.node.style.height = `${height}px`;
    new ResizeObserver(() => this.#resize()).observe(this.node);
    document.addEventListener("themechange", () => this.draw());
  }

  /** `values`: one list per series, as long as `t`; null if nothing was measured. */
  update({ t, now, values }) {
    this.#data = { t, now, values };
    const last = this.series.map(({ name }, i) => `${name} ${this.format(lastNumber(values[i]))}`);
    this.node.setAttribute("aria-label", `${this.label}, last: ${last.join(", ")}`);
    this.draw();
  }

  draw() {
    const width = this.#width;
    if (width < 80) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    const top = niceCeiling(Math.max(0, ...this.#data.values.flat().filter((v) => v !== null)));
    this.svg.replaceChildren(
      ...this.#grid(top), ...this.series.flatMap((_, i) => this.#line(i, top)), ...this.#cursor(top));
  }

  #resize() {
    const width = Math.floor(this.node.clientWidth);
    if (width === this.#width) return;
    this.#width = width;
    this.draw();
  }

  #x(time) {
    const inner = this.#width - MARGIN.left - MARGIN.right;
    return MARGIN.left + inner * (1 - (this.#data.now - time) / WINDOW_S);
  }

  #y(value, top) {
    return this.height - MARGIN.bottom - (this.height - MARGIN.top - MARGIN.bottom) * (value / top);
  }

  #grid(top) {
    const right = this.#width - MARGIN.right;
    const parts = [0, top / 2, top].flatMap((value) => {
      const y = this.#y(value, top);
      return [
        svgElement("line", { x1: MARGIN.left, x2: right, y1: y, y2: y, class: value ? "grid" : "axis" }),
        svgElement("text", { x: MARGIN.left - 6, y: y + 4, class: "tick end" }, this.format(value)),
      ];
    });
    const words = this.#width < 300 ? [[300, "5 min ago"], [0, "now"]]
      : [[300, "5 min ago"], [200, ""], [100, ""], [0, "now"]];
    for (const [age, word] of words) {
      const x = this.#x(this.#data.now - age);
      const side = age === 300 ? "start" : "end";
      parts.push(svgElement("text", { x, y: this.height - 4, class: `tick ${side}` }, word));
    }
    return parts;
  }

  #line(i, top) {
    const { t, now } = this.#data;
    let path = "";
    let isDrawing = false;
    this.#data.values[i]?.forEach((value, k) => {
      if (value === null || t[k] < now - WINDOW_S) {
        isDrawing = false;
        return;
      }
      const point = `${this.#x(t[k]).toFixed(1)} ${this.#y(value, top).toFixed(1)}`;
      path += isDrawing ? `L${point}` : `M${point}h0`; // h0 draws a single number as a dot
      isDrawing = true;
    });
    if (!path) return [];
    return [svgElement("path", { d: path, class: `curve ${this.series[i].variable}` })];
  }

  #cursor(top) {
    const { t, values } = this.#data;
    if (this.#at === null || this.#at >= t.length) return [];
    const x = this.#x(t[this.#at]);
    const line = svgElement("line", {
      x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom, class: "cursor",
    });
    const dots = this.series.flatMap(({ variable }, i) => {
      const value = values[i]?.[this.#at];
      if (value === null || value === undefined) return [];
      return [svgElement("circle", { cx: x, cy: this.#y(value, top), r: 3.5, class: `dot ${variable}` })];
    });
    return [line, ...dots];
  }

  #point(event) {
    const box = this.node.getBoundingClientRect();
    const inner = this.#width - MARGIN.left - MARGIN.right;
    const share = (event.clientX - box.left - MARGIN.left) / inner;
    const time = this.#data.now - WINDOW_S * (1 - share);
    this.#read(nearest(this.#data.t, time), event.clientX, event.clientY);
  }

  #step(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move === undefined || this.#data.t.length === 0) return;
    event.preventDefault();
    const last = this.#data.t.length - 1;
    const at = Math.min(last, Math.max(0, (this.#at ?? last + 1) + move));
    const box = this.node.getBoundingClientRect();
    this.#read(at, box.left + this.#x(this.#data.t[at]), box.top + MARGIN.top);
    announce(this.#reading(at).join(", "));
  }

  #read(at, x = 0, y = 0) {
    this.#at = at;
    if (at === null) hideTooltip();
    else showTooltip(this.#reading(at), x, y);
    this.draw();
  }

  #reading(at) {
    const rows = this.series.map(({ name }, i) =>
      `${name}: ${this.format(this.#data.values[i]?.[at] ?? null)}`);
    return [clock(this.#data.t[at]), ...rows];
  }
}

/** The names of the lines with their last values. */
export class ChartLegend {
  constructor(series) {
    this.values = series.map(() => element("span", { class: "number" }));
    this.node = element("div", { class: "legend" }, ...series.map(({ name, variable }, i) =>
      element("span", { class: "key" },
        element("i", { class: `swatch line ${variable}` }), name, this.values[i])));
  }

  update(texts) {
    this.values.forEach((node, i) => setText(node, texts[i]));
  }
}

export function lastNumber(values) {
  return (values ?? []).findLast((value) => value !== null) ?? null;
}

function nearest(times, time) {
  if (times.length === 0) return null;
  let best = 0;
  times.forEach((value, i) => {
    if (Math.abs(value - time) < Math.abs(times[best] - time)) best = i;
  });
  return best;
}

/** Rounds up to one of 1, 2, 4, 5, 10, 20...: half of it is a round number as well. */
export function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((step) => step * power).find((ceiling) => ceiling >= value * 0.999);
}
