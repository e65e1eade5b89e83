// Colours tokens: by the share of experts in common with the previous token, or by whether the token
// chose one given expert (which a line below it also shows, so that colour alone is not needed).
import { theme } from "../charts/colour_scale.js";
import { similarity } from "./routing.js";

/** `mode`: "similarity" (in one layer, the row `layer`, or in all where that is null), "expert" or "none". */
export function paintToken(node, tokens, index, { mode, layer, expert }) {
  node.classList.toggle("chose", mode === "expert" && (tokens[index]?.[layer]?.includes(expert) ?? false));
  node.style.background = "";
  if (mode !== "similarity" || index === 0) return;
  const [own, before] = [tokens[index], tokens[index - 1]].map((experts) => inLayer(experts ?? [], layer));
  if (own.length && before.length) node.style.background = similarityColour(similarity(own, before));
}

/** No colour for different experts, deeper the more are the same; always pale enough for text. */
export function similarityColour(share) {
  const alpha = (Math.sqrt(share) * (theme() === "dark" ? 0.62 : 0.55)).toFixed(3); // few experts are the same by chance
  return theme() === "dark" ? `rgb(40 105 175 / ${alpha})` : `rgb(86 155 220 / ${alpha})`;
}

function inLayer(experts, layer) {
  return layer === null ? experts : experts.slice(layer, layer + 1);
}
