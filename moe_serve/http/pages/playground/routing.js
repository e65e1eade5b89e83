// Compares the experts of an answer's tokens. A token's experts: one list of ids per layer.

/** The share of experts that two tokens have in common, mean over layers, 0 to 1. */
export function similarity(one, other) {
  const shares = one.map((ids, layer) => {
    const others = new Set(other[layer] ?? []);
    return ids.filter((id) => others.has(id)).length / Math.max(1, ids.length);
  });
  return shares.reduce((sum, share) => sum + share, 0) / Math.max(1, shares.length);
}

/** Counts how often the first `numTokens` tokens chose each expert of each layer. */
export function countChoices(tokens, numTokens, numLayers, numExperts) {
  const counts = Array.from({ length: numLayers }, () => new Array(numExperts).fill(0));
  for (const layers of tokens.slice(0, numTokens)) {
    layers.forEach((ids, layer) => ids.forEach((id) => {
      counts[layer][id] += 1;
    }));
  }
  return counts;
}

/** The layer number in the model for a row of experts: a model's first layers may be dense, without experts. */
export function numberOf(extent, row) {
  return extent?.layers?.[row] ?? row;
}

/** The number of layers, and the highest expert id plus one, of these tokens. */
export function extentOf(tokens) {
  const numLayers = Math.max(0, ...tokens.map((layers) => layers.length));
  let highest = -1;
  for (const layers of tokens) for (const ids of layers) for (const id of ids) highest = Math.max(highest, id);
  return { numLayers, numExperts: highest + 1 };
}
