// How the tokens of the answers are coloured.
import { element } from "./element.js";

export class ColouringControl {
  constructor(onChange) {
    this.onChange = onChange;
    this.mode = element("select", { id: "colouring", change: () => this.#changed() },
      element("option", { value: "similarity" }, "same experts as the token before"),
      element("option", { value: "expert" }, "those that chose one expert"),
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

  /** `layer`: null means all of them. */
  get value() {
    const mode = this.mode.value;
    const layer = numberIn(this.layer);
    return { mode, layer: mode === "expert" ? layer ?? 0 : layer, expert: numberIn(this.expert) ?? 0 };
  }

  setExtent({ numLayers, numExperts }) {
    this.layer.max = `${Math.max(0, numLayers - 1)}`;
    this.expert.max = `${Math.max(0, numExperts - 1)}`;
  }

  /** As if the fields had been filled in. */
  chooseExpert(layer, expert) {
    this.mode.value = "expert";
    this.layer.value = `${layer}`;
    this.expert.value = `${expert}`;
    this.#changed();
  }

  #field(id, placeholder) {
    return element("input", { id, type: "number", min: 0, step: 1, placeholder, input: () => this.#changed() });
  }

  #changed() {
    const { mode } = this.mode.value === "none" ? { mode: "none" } : this.value;
    this.layer.placeholder = mode === "expert" ? "0" : "all";
    for (const node of [this.layer, this.layerLabel]) node.hidden = mode === "none";
    for (const node of [this.expert, this.expertLabel]) node.hidden = mode !== "expert";
    this.onChange();
  }
}

function numberIn(field) {
  const value = Number.parseInt(field.value, 10);
  return Number.isNaN(value) ? null : Math.min(Math.max(0, value), Number(field.max || value));
}
