// Times are ns since the run's start, as numbers: whole up to 2^53 (104 days). A view is {from, to}.

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
const MIN_VIEW_NS = 40;
const TICK_PX = 110;
// Labels with more digits than this are split: the common part is shown once, at the left.
const MAX_LABEL_STEPS = 20000;

/** A duration with three digits, as tracekit.model.units.duration writes it. */
function durationText(ns) {
  const [scale, unit] = UNITS.find(([scale]) => Math.abs(ns) >= scale) ?? [1, "ns"];
  const scaled = ns / scale;
  return `${Math.abs(scaled) >= 1000 ? scaled.toFixed(0) : Number(scaled.toPrecision(3))} ${unit}`;
}

/** A moment to the ns, in ms. */
function momentText(ns) {
  return `${(ns / 1e6).toLocaleString("en", { maximumFractionDigits: 6 })} ms`;
}

function clamp(value, min, max) {
  return Math.min(Math.max(value, min), max);
}

/** The view moved into [0, spanNs], with its length unchanged if it fits. */
function withinRun(view, spanNs) {
  const length = clamp(view.to - view.from, Math.min(MIN_VIEW_NS, spanNs), spanNs);
  const middle = (view.from + view.to) / 2;
  const from = clamp(middle - length / 2, 0, spanNs - length);
  return { from, to: from + length };
}

/** The view `factor` times as long, with the moment `atNs` at the same position on the screen. */
function zoomed(view, factor, atNs, spanNs) {
  const length = clamp((view.to - view.from) * factor, Math.min(MIN_VIEW_NS, spanNs), spanNs);
  const share = (atNs - view.from) / (view.to - view.from);
  return withinRun({ from: atNs - share * length, to: atNs + (1 - share) * length }, spanNs);
}

/** The view moved by a share of its length. */
function panned(view, share, spanNs) {
  const byNs = share * (view.to - view.from);
  return withinRun({ from: view.from + byNs, to: view.to + byNs }, spanNs);
}

/** The ticks of a ruler: their moments and labels, and the moment they count from ('' for `zeroNs`). */
function ticks(view, widthPx, zeroNs = 0) {
  const [from, to] = [view.from - zeroNs, view.to - zeroNs];
  const stepNs = roundStep(((to - from) * TICK_PX) / widthPx);
  const isSplit = Math.max(to, -from) / stepNs > MAX_LABEL_STEPS;
  const baseNs = isSplit ? Math.floor(from / (stepNs * 100)) * stepNs * 100 : 0;
  const [scale, unit] = UNITS.find(([scale]) => scale <= Math.max(to - baseNs, baseNs - from, 1));
  const decimals = Math.max(0, Math.ceil(-Math.log10(stepNs / scale) - 1e-9));
  const marks = [];
  for (let n = Math.ceil(from / stepNs); n * stepNs <= to; n++) {
    const label = ((n * stepNs - baseNs) / scale).toFixed(decimals);
    marks.push({ atNs: n * stepNs + zeroNs, label: `${isSplit ? "+" : ""}${label} ${unit}` });
  }
  return { marks, base: isSplit ? momentText(baseNs) : "" };
}

function roundStep(minNs) {
  const power = 10 ** Math.floor(Math.log10(Math.max(minNs, 1)));
  return power * ([1, 2, 5].find((n) => n * power >= minNs) ?? 10);
}
