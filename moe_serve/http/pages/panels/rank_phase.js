// Finds the ranks that are not serving.

const CALM = new Set(["serving", "ready", "running"]);

export function isAway({ phase }) {
  return !CALM.has(phase);
}

/** Names the ranks that are away if no rank has KV pages; null if there are pages. */
export function whoHasThePages({ kv, ranks }) {
  const away = ranks.filter((rank) => rank.kind === "attention" && isAway(rank)).map(({ name }) => name);
  if (away.length === 0 || kv.tiers.some(({ pages }) => pages > 0)) return null;
  return away.length === 1 ? `${away[0]} is away` : `${away.join(", ")} are away`;
}
