// The heat map of the experts: the rows of each in the window, relative to its layer's mean.
import { element, setText } from "../shared/element.js";
import { bytes, count, percent, times } from "../shared/format.js";
import { diverging, placeAroundMean } from "../charts/colour_scale.js";
import { HeatMap } from "../charts/heat_map.js";
import { Panel } from "./panel.js";
import { Ramp } from "../charts/ramp.js";

export class ExpertsPanel {
  #experts = null;
  #order = null; // per layer: the expert of each column

  constructor() {
    this.sorting = element("select", { id: "expert-order", change: () => this.#draw() },
      element("option", { value: "id" }, "by number"),
      element("option", { value: "load" }, "by load"));
    const label = element("label", { for: "expert-order", class: "muted" }, "Order");
    this.panel = new Panel({ id: "experts", title: "Expert load", size: "wide", tools: [label, this.sorting] });
    this.summary = element("p", { class: "summary" });
    this.map = new HeatMap({ label: "Expert load", describe: (row, column) => this.#words(row, column) });
    const ramp = new Ramp("rows, compared with the layer's mean", diverging, ["¼×", "½×", "mean", "2×", "4×"]);
    this.panel.body.append(this.summary, this.map.node, ramp.node);
  }

  update({ experts, expert_memory: memory }) {
    this.#experts = experts;
    if (experts === null) {
      this.panel.note("");
      this.panel.sayInstead("This server does not count the rows of its experts.");
      return;
    }
    const cache = memory === null ? "" : `; resident ${bytes(memory.resident_bytes)}, hit rate ${percent(memory.hit_rate)}`;
    this.panel.note(`${experts.num_layers} layers × ${experts.num_experts} experts, top ${experts.top_k}${cache}`);
    if (experts.num_tokens === 0) {
      this.panel.sayInstead(`No token in the last ${experts.window_s} s: nothing was routed.`);
      return;
    }
    this.panel.sayInstead(null);
    setText(this.summary, summaryOf(experts));
    this.#draw();
  }

  #draw() {
    const experts = this.#experts;
    if (experts === null || experts.num_tokens === 0) return;
    const isByLoad = this.sorting.value === "load";
    this.#order = experts.load.map((row) => {
      const ids = row.map((_, expert) => expert);
      return isByLoad ? ids.sort((a, b) => row[b] - row[a]) : ids;
    });
    this.map.update({
      numRows: experts.load.length,
      numColumns: experts.num_experts,
      layerOf: (row) => experts.layers[row],
      colourOf: (row, column) => diverging(placeAroundMean(this.#ratio(row, this.#order[row][column]))),
      label: `Expert load, layer by expert. ${summaryOf(experts)}`,
    });
  }

  #ratio(row, expert) {
    const load = this.#experts.load[row];
    const mean = sum(load) / load.length;
    return mean === 0 ? 1 : load[expert] / mean;
  }

  #words(row, column) {
    const expert = this.#order[row][column];
    const load = this.#experts.load[row];
    const activated = this.#experts.activated_mean?.[row];
    return [
      `Layer ${this.#experts.layers[row]}, expert ${expert}`,
      `${count(load[expert])} rows, ${times(this.#ratio(row, expert))} its layer's mean`,
      activated === undefined ? "" : `${activated.toFixed(1)} of ${load.length} experts activated per step in this layer`,
    ].filter((line) => line);
  }
}

/** "24 tokens counted in the last 60 s. Busiest: ..." */
export function summaryOf({ load, layers, num_tokens: numTokens, window_s: windowS, activated_mean: activated }) {
  let busiest = { ratio: 0, layer: layers[0], expert: 0 };
  let numIdle = 0;
  load.forEach((row, i) => {
    const mean = sum(row) / row.length;
    row.forEach((rows, expert) => {
      if (rows === 0) numIdle += 1;
      if (mean > 0 && rows / mean > busiest.ratio) busiest = { ratio: rows / mean, layer: layers[i], expert };
    });
  });
  const numCells = load.length * (load[0]?.length ?? 0);
  const most = `Busiest: layer ${busiest.layer}, expert ${busiest.expert} with ${times(busiest.ratio)} its layer's mean.`;
  const idle = numIdle === 0 ? "Every expert was chosen." : `${count(numIdle)} of ${count(numCells)} were never chosen.`;
  const perStep = activated === null ? "" : ` A step activates ${(sum(activated) / activated.length).toFixed(1)} experts of a layer.`;
  return `${count(numTokens)} tokens counted in the last ${windowS} s. ${most} ${idle}${perStep}`;
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}
