// Which ranks are there, and which are away.

const CALM = new Set(["serving", "ready", "running"]);

export function isAway({ phase }) {
  return !CALM.has(phase);
}

/** Where nobody has KV pages: who is away with them, in words; null where there are some. */
export function whoHasThePages({ kv, ranks }) {
  const away = ranks.filter((rank) => rank.kind === "attention" && isAway(rank)).map(({ name }) => name);
  if (away.length === 0 || kv.tiers.some(({ pages }) => pages > 0)) return null;
  return away.length === 1 ? `${away[0]} is away` : `${away.join(", ")} are away`;
}
