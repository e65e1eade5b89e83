// The frame of every part of the dashboard: a heading, a note beside it, tools, and a body that
// is replaced by a sentence when there is nothing to show.
import { element, setText } from "../shared/element.js";

export class Panel {
  constructor({ id, title, size = "", tools = [] }) {
    this.noteNode = element("span", { class: "note" });
    this.body = element("div", { class: "panel-body" });
    this.empty = element("p", { class: "empty", hidden: true });
    const heading = element("h2", { id: `${id}-title` }, title);
    this.node = element("section", { class: `panel ${size}`, id, "aria-labelledby": `${id}-title` },
      element("div", { class: "panel-head" }, heading, this.noteNode,
        tools.length ? element("div", { class: "tools" }, ...tools) : null),
      this.body, this.empty);
  }

  note(text) {
    setText(this.noteNode, text);
  }

  /** Shows `sentence` in place of the body; null shows the body. */
  sayInstead(sentence) {
    this.body.hidden = sentence !== null;
    this.empty.hidden = sentence === null;
    setText(this.empty, sentence ?? "");
  }
}
