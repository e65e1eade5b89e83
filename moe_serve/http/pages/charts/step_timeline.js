// The timeline of one step: a track for each rank, spans coloured by kind of work, the number of
// the micro-batch inside if there is room. Waiting is a thin line.
import { colour, element } from "../shared/element.js";
import { digits, milliseconds } from "../shared/format.js";
import { niceCeiling } from "./line_chart.js";
import { announce, hideTooltip, showTooltip } from "../shared/tooltip.js";
import { theme } from "./colour_scale.js";

const LEFT = 104;
const ROW = 30;
const BAR = 22;
const BOTTOM = 22;
const TICK_PX = 80; // the minimum distance between two time labels

// Okabe and Ito's colours, which colour-blind readers can distinguish, a little darker on white.
const KINDS = {
  attention: { light: "#1f66b8", dark: "#5aa2ee" },
  experts: { light: "#d55e00", dark: "#f08a3c" },
  shared: { light: "#8a6d00", dark: "#d9bd2b" },
  dispatch: { light: "#56b4e9", dark: "#9ad7fb" },
  combine: { light: "#009e73", dark: "#34c79c" },
  sample: { light: "#b0568c", dark: "#e79bc8" },
  other: { light: "#7b8794", dark: "#8895a4" },
  wait: { light: "#b4bdc8", dark: "#4a5665" },
};
const FAMILIES = { send: "dispatch", pack: "dispatch", logits: "sample" };

export function familyOf(kind) {
  if (kind.includes("wait")) return "wait";
  return FAMILIES[kind] ?? (kind in KINDS ? kind : "other");
}

export function kindColour(family) {
  return KINDS[family][theme()];
}

export class StepTimeline {
  #step = null;
  #zoom = 1;
  #width = 0;
  #read = null; // [track, span] with the reading

  constructor() {
    this.canvas = element("canvas", {
      tabindex: 0, role: "application", "aria-roledescription": "timeline",
      "aria-label": "What each rank did in the last step",
      pointermove: (event) => this.#point(event),
      pointerdown: (event) => this.#point(event),
      pointerleave: () => this.#pick(null),
      blur: () => this.#pick(null),
      keydown: (event) => this.#move(event),
    });
    this.node = element("div", { class: "chart scroller" }, this.canvas);
    new ResizeObserver(() => this.#resize()).observe(this.node);
    document.addEventListener("themechange", () => this.draw());
  }

  /** Clears the reading and its tooltip, which belong to one step. */
  update(step) {
    if (step.number !== this.#step?.number) this.#pick(null);
    this.#step = step;
    this.draw();
  }

  zoomTo(zoom) {
    this.#zoom = zoom;
    this.draw();
  }

  draw() {
    if (this.#step === null || this.#width < 160) return;
    const pen = this.#prepare();
    pen.font = `12px ${getComputedStyle(document.documentElement).fontFamily}`;
    this.#axis(pen);
    this.#step.tracks.forEach((track, row) => {
      pen.fillStyle = colour("ink");
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      pen.fillText(track.name, 0, row * ROW + ROW / 2, LEFT - 8);
      pen.fillStyle = colour("sunken");
      pen.fillRect(LEFT, row * ROW + 4, this.#inner, BAR);
      track.spans.forEach((span, i) => this.#bar(pen, row, span, this.#isRead(row, i)));
    });
  }

  get #inner() {
    return (this.#width - LEFT - 4) * this.#zoom;
  }

  #x(ms) {
    return LEFT + (ms / Math.max(this.#step.duration_ms, 1e-6)) * this.#inner;
  }

  #isRead(row, i) {
    return this.#read !== null && this.#read[0] === row && this.#read[1] === i;
  }

  #bar(pen, row, span, isRead) {
    const family = familyOf(span.kind);
    const x = this.#x(span.start_ms);
    const width = Math.max(0.75, this.#x(span.end_ms) - x);
    const height = family === "wait" ? 4 : BAR;
    const y = row * ROW + 4 + (BAR - height) / 2;
    pen.fillStyle = kindColour(family);
    pen.fillRect(x, y, width > 3 ? width - 0.5 : width, height);
    if (isRead) {
      pen.strokeStyle = colour("ink");
      pen.lineWidth = 2;
      pen.strokeRect(x, y, width, height);
    }
    if (width >= 13 && family !== "wait" && span.micro_batch !== null && span.micro_batch !== undefined) {
      pen.fillStyle = inkOn(pen.fillStyle);
      pen.textAlign = "center";
      pen.fillText(`${span.micro_batch}`, x + width / 2, y + height / 2 + 0.5);
    }
  }

  #axis(pen) {
    const bottom = this.#step.tracks.length * ROW;
    const tick = niceCeiling((this.#step.duration_ms * TICK_PX) / this.#inner);
    pen.strokeStyle = colour("grid");
    pen.fillStyle = colour("muted");
    pen.textBaseline = "alphabetic";
    for (let ms = 0; ms <= this.#step.duration_ms; ms += tick) {
      const x = this.#x(ms);
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, bottom + 4);
      pen.stroke();
      const hasRoom = x + TICK_PX / 3 < LEFT + this.#inner;
      pen.textAlign = ms === 0 ? "left" : hasRoom ? "center" : "right";
      pen.fillText(`${digits(ms)} ms`, x, bottom + 17);
    }
  }

  #prepare() {
    const width = LEFT + this.#inner + 4;
    const height = this.#step.tracks.length * ROW + BOTTOM;
    const ratio = Math.min(window.devicePixelRatio || 1, 16000 / width);
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    return pen;
  }

  #resize() {
    const width = Math.floor(this.node.clientWidth);
    if (width === this.#width) return;
    this.#width = width;
    this.draw();
  }

  #point(event) {
    if (this.#step === null) return;
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / ROW);
    const x = event.clientX - box.left;
    const spans = this.#step.tracks[row]?.spans ?? [];
    const i = spans.findIndex((span) =>
      x >= this.#x(span.start_ms) && x <= Math.max(this.#x(span.end_ms), this.#x(span.start_ms) + 2));
    this.#pick(i < 0 ? null : [row, i], event.clientX, event.clientY);
  }

  #move(event) {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (move === undefined || this.#step === null) return;
    event.preventDefault();
    const { tracks } = this.#step;
    const [row, i] = this.#read ?? [0, -1];
    const track = Math.min(tracks.length - 1, Math.max(0, row + move[0]));
    const last = tracks[track].spans.length - 1;
    if (last < 0) return;
    const span = Math.min(last, Math.max(0, move[0] ? Math.min(i, last) : i + move[1]));
    const box = this.canvas.getBoundingClientRect();
    this.#pick([track, span], box.left + this.#x(tracks[track].spans[span].start_ms), box.top + track * ROW);
    announce(this.#words(track, span).join(", "));
  }

  #pick(read, x = 0, y = 0) {
    if (read === null && this.#read === null) return;
    this.#read = read;
    if (read === null) hideTooltip();
    else showTooltip(this.#words(...read), x, y);
    this.draw();
  }

  #words(row, i) {
    const track = this.#step.tracks[row];
    const span = track.spans[i];
    const where = [];
    if (isCount(span.layer)) where.push(`layer ${span.layer}`);
    if (isCount(span.micro_batch)) where.push(`micro-batch ${span.micro_batch}`);
    const length = milliseconds(span.end_ms - span.start_ms);
    return [`${track.name}: ${span.kind.replaceAll("_", " ")}`, where.join(", "),
      `${length}, from ${milliseconds(span.start_ms)} to ${milliseconds(span.end_ms)}`]
      .filter((line) => line);
  }
}

const isCount = (value) => Number.isInteger(value) && value >= 0;

/** Returns black or white, whichever has more contrast on a colour. */
function inkOn(background) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(background.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#10151b" : "#ffffff";
}
