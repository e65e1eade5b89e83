// The controls for the colouring of the answers' tokens.
import { element } from "../shared/element.js";

export class ColouringControl {
  #layers = [0]; // the layer number of each row of a token's experts

  constructor(onChange) {
    this.onChange = onChange;
    this.mode = element("select", { id: "colouring", change: () => this.#changed() },
      element("option", { value: "similarity" }, "experts in common with the previous token"),
      element("option", { value: "expert" }, "whether they chose one expert"),
      element("option", { value: "none" }, "none"));
    this.layer = this.#field("layer", "all");
    this.expert = this.#field("expert", "0");
    this.expertLabel = element("label", { for: "expert", hidden: true }, "Expert");
    this.expert.hidden = true;
    this.layerLabel = element("label", { for: "layer" }, "Layer");
    this.node = element("div", { class: "colouring" },
      element("label", { for: "colouring" }, "Colour tokens by"), this.mode,
      element("span", { class: "colouring-fields" }, this.layerLabel, this.layer, this.expertLabel, this.expert));
  }

  /** `layer`: the row of a token's experts; null means all rows, -1 a layer without experts. */
  get value() {
    const mode = this.mode.value;
    const number = numberIn(this.layer) ?? (mode === "expert" ? this.#layers[0] : null);
    return { mode, layer: number === null ? null : this.#layers.indexOf(number), expert: numberIn(this.expert) ?? 0 };
  }

  setExtent({ numLayers, numExperts, layers = null }) {
    if (numLayers > 0) this.#layers = layers ?? Array.from({ length: numLayers }, (_, row) => row);
    this.layer.min = `${this.#layers[0]}`;
    this.layer.max = `${this.#layers.at(-1)}`;
    this.#tellFirstLayer();
    this.expert.max = `${Math.max(0, numExperts - 1)}`;
  }

  /** Sets the fields as if a user had filled them in. */
  chooseExpert(row, expert) {
    this.mode.value = "expert";
    this.layer.value = `${this.#layers[row] ?? row}`;
    this.expert.value = `${expert}`;
    this.#changed();
  }

  #field(id, placeholder) {
    return element("input", { id, type: "number", min: 0, step: 1, placeholder, input: () => this.#changed() });
  }

  #tellFirstLayer() {
    this.layer.placeholder = this.mode.value === "expert" ? `${this.#layers[0]}` : "all";
  }

  #changed() {
    const mode = this.mode.value;
    this.#tellFirstLayer();
    for (const node of [this.layer, this.layerLabel]) node.hidden = mode === "none";
    for (const node of [this.expert, this.expertLabel]) node.hidden = mode !== "expert";
    this.onChange();
  }
}

function numberIn(field) {
  const value = Number.parseInt(field.value, 10);
  return Number.isNaN(value) ? null : Math.min(Math.max(Number(field.min), value), Number(field.max || value));
}
