// Names and values side by side, kept in place while the values change.
import { element, setText } from "../shared/element.js";

export class FactList {
  #values = new Map();

  constructor() {
    this.node = element("dl", { class: "facts" });
  }

  /** `facts`: [[name, text]]; a null text omits the line. */
  update(facts) {
    const shown = facts.filter(([, text]) => text !== null);
    const names = shown.map(([name]) => name);
    if (names.join() !== [...this.#values.keys()].join()) {
      this.#values = new Map(names.map((name) => [name, element("dd", {})]));
      this.node.replaceChildren(
        ...names.flatMap((name) => [element("dt", {}, name), this.#values.get(name)]));
    }
    for (const [name, text] of shown) setText(this.#values.get(name), text);
  }
}
