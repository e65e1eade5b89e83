// One line of a bar chart: a name, a bar from 0 to 1 with an optional mark, a figure.
import { element, setText } from "../shared/element.js";

export class BarRow {
  constructor() {
    this.name = element("span", {});
    this.fill = element("i", {});
    this.mark = element("b", { hidden: true });
    this.bar = element("div", { class: "bar", role: "img" }, this.fill, this.mark);
    this.figure = element("span", { class: "figure" });
    this.node = element("div", { class: "bar-row" }, this.name, this.bar, this.figure);
  }

  /** `share` and `mark` are 0..1 of the bar's length. */
  update({ name, share, mark = null, figure, label }) {
    setText(this.name, name);
    setText(this.figure, figure);
    this.bar.setAttribute("aria-label", label);
    this.bar.title = label;
    this.fill.style.width = width(share);
    this.mark.hidden = mark === null;
    this.mark.style.left = width(mark ?? 0);
  }
}

/** Adjusts the number of rows to the items and keeps existing rows. */
export function fitRows(host, rows, count, make = () => new BarRow()) {
  while (rows.length < count) {
    const row = make();
    rows.push(row);
    host.append(row.node);
  }
  while (rows.length > count) rows.pop().node.remove();
}

function width(share) {
  return `${Math.min(1, Math.max(0, share)) * 100}%`;
}
