// The panels beside the conversation: the experts of the chosen token and of the whole answer.
import { element, setText } from "../shared/element.js";
import { count, plural } from "../shared/format.js";
import { sequential } from "../charts/colour_scale.js";
import { HeatMap } from "../charts/heat_map.js";
import { Ramp } from "../charts/ramp.js";
import { countChoices, extentOf, numberOf } from "./routing.js";
import { visible } from "./visible_text.js";

class CountsPanel {
  constructor(host, onPick, { id, title, label, empty }) {
    this.counts = [];
    this.extent = null; // of the model
    this.empty = empty;
    this.about = element("p", { class: "about" }, empty);
    this.map = new HeatMap({ label, onPick, describe: (row, column) => this.words(row, column), maxHeight: 300, maxRowHeight: 22 });
    this.ramp = new Ramp("times chosen", sequential, ["0", "1"]);
    this.body = element("div", { hidden: true }, this.map.node, this.ramp.node);
    host.append(element("div", { class: "panel-head" }, element("h2", { id: `${id}-title` }, title)), this.about, this.body);
  }

  clear() {
    this.body.hidden = true;
    setText(this.about, this.empty);
  }

  layerOf(row) {
    return numberOf(this.extent, row);
  }

  draw(counts, extent, isMarked) {
    this.counts = counts;
    this.extent = extent;
    const most = Math.max(1, ...counts.map((row) => Math.max(...row)));
    this.body.hidden = false;
    this.ramp.setTicks(["0", count(most)]);
    this.map.update({
      numRows: counts.length, numColumns: counts[0]?.length ?? 0, isMarked,
      layerOf: (row) => this.layerOf(row),
      colourOf: (row, column) => sequential(counts[row][column] / most),
    });
  }
}

/** The experts of one token in frames, over the counts of the answer up to this token. */
export class TokenPanel extends CountsPanel {
  #experts = [];

  constructor(host, onPick) {
    super(host, onPick, {
      id: "token", title: "Experts of one token", label: "Experts of the chosen token",
      empty: "Hover, tap or focus a token of an answer to see which experts it chose.",
    });
  }

  show(answer, index, extent) {
    this.#experts = answer.experts[index].map((ids) => new Set(ids));
    this.about.replaceChildren(`Token ${index + 1} `, element("b", {}, visible(JSON.stringify(answer.tokenString(index)))),
      ` chose the framed experts; the colours count the ${plural(index + 1, "token")} up to it.`);
    const { numLayers, numExperts } = merged(extentOf(answer.experts), extent);
    this.draw(countChoices(answer.experts, index + 1, numLayers, numExperts), extent,
      (row, column) => this.#experts[row]?.has(column) ?? false);
  }

  words(row, column) {
    const isChosen = this.#experts[row]?.has(column);
    return [`Layer ${this.layerOf(row)}, expert ${column}`, isChosen ? "chosen by this token" : "not chosen by this token",
      `chosen ${plural(this.counts[row][column], "time")} so far`];
  }
}

/** The experts of the whole answer. */
export class AnswerPanel extends CountsPanel {
  constructor(host, onPick) {
    super(host, onPick, {
      id: "answer", title: "Experts of the answer", label: "Experts of the whole answer",
      empty: "No answer yet.",
    });
  }

  show(answer, extent) {
    if (answer.numTokens === 0) {
      this.clear();
      return;
    }
    const { numLayers, numExperts } = merged(extentOf(answer.experts), extent);
    this.draw(countChoices(answer.experts, answer.numTokens, numLayers, numExperts), extent);
    const used = this.counts.map((row) => row.filter((times) => times > 0).length);
    const mean = used.reduce((sum, number) => sum + number, 0) / Math.max(1, used.length);
    setText(this.about, `${plural(answer.numTokens, "token")} chose ${mean.toFixed(1)} of ${numExperts} experts in a layer, on average.`);
  }

  words(row, column) {
    return [`Layer ${this.layerOf(row)}, expert ${column}`, `chosen ${plural(this.counts[row][column], "time")} in this answer`];
  }
}

/** The server's figures for its model take precedence over the ids seen in an answer. */
function merged(seen, extent) {
  return {
    numLayers: Math.max(seen.numLayers, extent?.numLayers ?? 0),
    numExperts: Math.max(seen.numExperts, extent?.numExperts ?? 0),
  };
}
