// Formats numbers for people. null and undefined become an en dash.
const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en") : NONE;
}

/** 1234567 -> 1.23M, for narrow places. */
export function compact(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e12) return `${digits(value / 1e12)}T`;
  if (size >= 1e9) return `${digits(value / 1e9)}G`;
  if (size >= 1e6) return `${digits(value / 1e6)}M`;
  if (size >= 1e4) return `${digits(value / 1e3)}k`;
  return size >= 100 || Number.isInteger(value) ? count(value) : digits(value);
}

export function milliseconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 ms";
  if (value < 1) return `${digits(value * 1000)} µs`;
  return value < 1000 ? `${digits(value)} ms` : `${digits(value / 1000)} s`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 60) return seconds < 10 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function percent(share) {
  if (!isNumber(share)) return NONE;
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${digits(value)} ${units[unit]}`;
}

export function times(ratio) {
  return isNumber(ratio) ? `${ratio.toFixed(ratio < 10 ? 2 : 0)}×` : NONE;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

export function plural(number, noun, many = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : many}`;
}

/** At most three significant digits. */
export function digits(value) {
  const size = Math.abs(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return Number(value.toFixed(1)).toString();
  return Number(value.toFixed(2)).toString();
}
