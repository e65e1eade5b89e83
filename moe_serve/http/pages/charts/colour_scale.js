// Colours for numbers on light and dark pages, which colour-blind readers can distinguish:
// blue against orange around the mean, one blue from pale to deep for counts.

const DIVERGING = {
  light: [[0, "#6b9fd4"], [0.25, "#b3cfea"], [0.5, "#eef1f4"], [0.75, "#f0a35a"], [1, "#8f3500"]],
  dark: [[0, "#33659f"], [0.25, "#27456a"], [0.5, "#222b36"], [0.75, "#b5651d"], [1, "#ffc078"]],
};
const SEQUENTIAL = {
  light: [[0, "#eceff3"], [0.25, "#bcd4ee"], [0.6, "#5b93cf"], [1, "#0b3c78"]],
  dark: [[0, "#222b36"], [0.25, "#26476f"], [0.6, "#4c86c9"], [1, "#bfdcff"]],
};
const SPAN = 2; // factors of two on either side of the mean

/** Maps a ratio to the mean to 0 (a quarter or less) ... 1 (four times or more). */
export function placeAroundMean(ratio) {
  if (ratio <= 0) return 0;
  return Math.min(1, Math.max(0, 0.5 + Math.log2(ratio) / (2 * SPAN)));
}

export function diverging(place) {
  return interpolate(DIVERGING[theme()], place);
}

export function sequential(place) {
  return interpolate(SEQUENTIAL[theme()], place);
}

export function theme() {
  return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
}

function interpolate(stops, place) {
  const x = Math.min(1, Math.max(0, place));
  const above = Math.max(1, stops.findIndex(([position]) => position >= x));
  const [from, low] = stops[above - 1];
  const [to, high] = stops[above];
  const share = (x - from) / (to - from);
  const mix = [1, 3, 5].map((at) => {
    const a = parseInt(low.slice(at, at + 2), 16);
    return Math.round(a + (parseInt(high.slice(at, at + 2), 16) - a) * share);
  });
  return `rgb(${mix.join(" ")})`;
}
