// The legend of a colour scale: a strip of its colours with labels at its ticks.
import { element } from "../shared/element.js";

export class Ramp {
  /** `scale(place)` gives the colour at 0..1; `ticks` are the labels under the strip. */
  constructor(title, scale, ticks) {
    this.scale = scale;
    this.canvas = element("canvas", { width: 160, height: 1, "aria-hidden": "true" });
    this.ticks = element("span", { class: "ticks" });
    this.node = element("div", { class: "ramp" }, element("span", {}, title),
      element("span", {}, this.canvas, this.ticks));
    this.setTicks(ticks);
    document.addEventListener("themechange", () => this.draw());
    this.draw();
  }

  setTicks(ticks) {
    this.ticks.replaceChildren(...ticks.map((tick) => element("span", {}, tick)));
  }

  draw() {
    const pen = this.canvas.getContext("2d");
    for (let x = 0; x < 160; x += 1) {
      pen.fillStyle = this.scale(x / 159);
      pen.fillRect(x, 0, 1, 1);
    }
  }
}
