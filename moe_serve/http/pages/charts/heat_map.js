// A grid of coloured cells on a canvas: layers down, experts across. The pointer or the arrow keys
// select a cell, whose text is shown and read out.
import { colour, element } from "../shared/element.js";
import { announce, hideTooltip, showTooltip } from "../shared/tooltip.js";

const LEFT = 34; // space for the layer numbers
const BOTTOM = 18;
const HALF_LINE = 6;
const MIN_GAP_CELL = 5; // smaller cells are drawn without gaps

export class HeatMap {
  #grid = { numRows: 0, numColumns: 0 };
  #cell = null; // [row, column] of the reading
  #width = 0;

  /** `describe(row, column)` gives the lines of the tooltip; a click or Enter calls `onPick` with a cell. */
  constructor({ label, describe, onPick = null, maxHeight = 420, maxRowHeight = 26 }) {
    this.describe = describe;
    this.onPick = onPick;
    this.maxHeight = maxHeight;
    this.maxRowHeight = maxRowHeight;
    this.canvas = element("canvas", {
      tabindex: 0, role: "application", "aria-roledescription": "heat map", "aria-label": label,
      pointermove: (event) => this.#point(event),
      pointerdown: (event) => this.#point(event),
      click: () => this.#choose(),
      pointerleave: () => this.#leave(),
      blur: () => this.#leave(),
      keydown: (event) => this.#step(event),
    });
    this.node = element("div", { class: "chart" }, this.canvas);
    new ResizeObserver(() => this.#resize()).observe(this.node);
    document.addEventListener("themechange", () => this.draw());
  }

  /** `colourOf(row, column)`; `isMarked(row, column)` draws a frame around the cell; `layerOf(row)`. */
  update({ numRows, numColumns, colourOf, isMarked = () => false, layerOf = (row) => row, label }) {
    this.#grid = { numRows, numColumns, colourOf, isMarked, layerOf };
    if (label) this.canvas.setAttribute("aria-label", label);
    this.draw();
    if (this.#cell !== null && this.#isInside(this.#cell)) this.#tell();
  }

  draw() {
    const { numRows, numColumns, colourOf, isMarked } = this.#grid;
    if (this.#width < 60 || numRows === 0) return;
    const pen = this.#prepare();
    const gap = Math.min(this.#cellWidth, this.#rowHeight) >= MIN_GAP_CELL ? 1 : 0;
    for (let row = 0; row < numRows; row += 1) {
      for (let column = 0; column < numColumns; column += 1) {
        const { x, y, width, height } = this.#box(row, column);
        pen.fillStyle = colourOf(row, column);
        pen.fillRect(x, y, width - gap, height - gap);
      }
    }
    const mark = colour("mark");
    for (let row = 0; row < numRows; row += 1) {
      for (let column = 0; column < numColumns; column += 1) {
        if (isMarked(row, column)) this.#frame(pen, row, column, 2.5, mark);
      }
    }
    if (this.#cell !== null && this.#isInside(this.#cell)) this.#frame(pen, ...this.#cell, 2, colour("ink"));
    this.#axes(pen);
  }

  get #cellWidth() {
    return (this.#width - LEFT) / this.#grid.numColumns;
  }

  get #rowHeight() {
    const fitting = Math.floor(this.maxHeight / this.#grid.numRows);
    return Math.max(4, Math.min(this.maxRowHeight, fitting));
  }

  #box(row, column) {
    const x = LEFT + column * this.#cellWidth;
    return { x, y: row * this.#rowHeight, width: this.#cellWidth, height: this.#rowHeight };
  }

  #prepare() {
    const height = this.#grid.numRows * this.#rowHeight + BOTTOM;
    const ratio = window.devicePixelRatio || 1;
    const [pixelWidth, pixelHeight] = [Math.round(this.#width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== pixelWidth || this.canvas.height !== pixelHeight) {
      this.canvas.width = pixelWidth;
      this.canvas.height = pixelHeight;
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.#width, height);
    return pen;
  }

  #frame(pen, row, column, thickness, stroke) {
    const { x, y, width, height } = this.#box(row, column);
    pen.strokeStyle = stroke;
    pen.lineWidth = thickness;
    pen.strokeRect(x + thickness / 2 - 0.5, y + thickness / 2 - 0.5, width - thickness, height - thickness);
  }

  #axes(pen) {
    const { numRows, numColumns, layerOf } = this.#grid;
    pen.fillStyle = colour("muted");
    pen.font = `12px ${getComputedStyle(document.documentElement).fontFamily}`;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const rowStep = Math.ceil(15 / this.#rowHeight);
    for (let row = 0; row < numRows; row += rowStep) {
      const y = Math.max(HALF_LINE, (row + 0.5) * this.#rowHeight); // the first row may be less high than its label
      pen.fillText(`L${layerOf(row)}`, LEFT - 6, y);
    }
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    const columnStep = niceStep(30 / this.#cellWidth);
    const y = numRows * this.#rowHeight + BOTTOM - 4;
    for (let column = 0; column < numColumns; column += columnStep) {
      pen.fillText(`${column}`, LEFT + (column + 0.5) * this.#cellWidth, y);
    }
  }

  #resize() {
    const width = Math.floor(this.node.clientWidth);
    if (width === this.#width) return;
    this.#width = width;
    this.draw();
  }

  #isInside([row, column]) {
    return row >= 0 && column >= 0 && row < this.#grid.numRows && column < this.#grid.numColumns;
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LEFT) / this.#cellWidth);
    const row = Math.floor((event.clientY - box.top) / this.#rowHeight);
    if (this.#isInside([row, column])) this.#pick([row, column]);
    else this.#leave();
  }

  #choose() {
    if (this.#cell !== null) this.onPick?.(...this.#cell);
  }

  #step(event) {
    if (event.key === "Enter") this.#choose();
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (move === undefined || this.#grid.numRows === 0) return;
    event.preventDefault();
    const [row, column] = this.#cell ?? [0, 0];
    const next = this.#cell === null ? [0, 0] : [row + move[0], column + move[1]];
    if (this.#isInside(next)) this.#pick(next);
    announce(this.describe(...(this.#isInside(next) ? next : [row, column])).join(", "));
  }

  #pick(cell) {
    this.#cell = cell;
    this.draw();
    this.#tell();
  }

  #tell() {
    const { x, y, width, height } = this.#box(...this.#cell);
    const box = this.canvas.getBoundingClientRect();
    showTooltip(this.describe(...this.#cell), box.left + x + width / 2, box.top + y + height / 2);
  }

  #leave() {
    if (this.#cell === null) return;
    this.#cell = null;
    hideTooltip();
    this.draw();
  }
}

/** Rounds up to a power of two, as models have powers of two of experts. */
function niceStep(least) {
  return 2 ** Math.max(0, Math.ceil(Math.log2(least)));
}
