// Shows the balance of the placement and the recall of the predictor.
import { element } from "../shared/element.js";
import { count, duration, percent } from "../shared/format.js";
import { BarRow } from "../charts/bar_row.js";
import { FactList } from "../charts/fact_list.js";
import { Panel } from "./panel.js";

export class PlacementPanel {
  constructor() {
    this.panel = new Panel({ id: "placement", title: "Placement" });
    this.balance = new BarRow();
    this.facts = new FactList();
    this.panel.body.append(this.balance.node, this.facts.node);
  }

  update({ placement, cell_placements = [] }) {
    if (placement === null && cell_placements.length === 0) {
      this.panel.note("");
      this.panel.sayInstead("No expert ranks: all experts are in one process.");
      return;
    }
    this.panel.sayInstead(null);
    this.balance.node.hidden = placement === null;
    if (placement === null) {
      this.panel.note("of each cell");
      this.facts.update(cell_placements.map((each) => [each.cell, summary(each)]));
      return;
    }
    this.panel.note(`version ${placement.version}`);
    const { balance } = placement;
    this.balance.update({
      name: "Balance",
      share: balance ?? 0,
      figure: balance === null ? "no load yet" : percent(balance),
      label: balance === null ? "no load yet" : `mean load of a rank over that of the busiest: ${percent(balance)}`,
    });
    this.facts.update([
      ["Replicas", count(placement.num_replicas)],
      ["In use for", duration(placement.age_s)],
      ["Last plan", placement.last_move ?? "none since the start"],
    ]);
  }
}

/** Returns the placement of a cell in one line. */
function summary({ version, balance, num_replicas, age_s, last_move }) {
  const parts = [
    `version ${version} for ${duration(age_s)}`,
    balance === null ? "balance not counted" : `balance ${percent(balance)}`,
    `${count(num_replicas)} replicas`,
  ];
  return [...parts, ...(last_move === null ? [] : [last_move])].join(" · ");
}

export class PredictorPanel {
  constructor() {
    this.panel = new Panel({ id: "predictor", title: "Predictor" });
    this.recall = new BarRow();
    this.facts = new FactList();
    this.panel.body.append(this.recall.node, this.facts.node,
      element("p", { class: "muted small" }, "Recall: the share of chosen experts that were predicted. Below its minimum (the mark) the predictor is not used."));
  }

  update({ predictor }) {
    if (predictor === null) {
      this.panel.note("");
      this.panel.sayInstead("No predictor: this server does not predict which experts requests will choose.");
      return;
    }
    this.panel.sayInstead(null);
    const { recall, floor } = predictor;
    this.panel.note(predictor.kind);
    this.recall.update({
      name: "Recall",
      share: recall ?? 0,
      mark: floor ?? null,
      figure: recall === null ? "none yet" : percent(recall),
      label: recall === null ? "nothing measured yet" : `recall ${percent(recall)}, minimum ${percent(floor)}`,
    });
    this.facts.update([
      ["Floor", percent(floor)],
      ["Followed", predictor.is_acting ? "yes" : "no"],
    ]);
  }
}
