// Keys, mouse and wheel. Everything here ends in a call of `Timeline`, which redraws.

const ZOOM_STEP = 0.7;
const PAN_SHARE = 0.15;
const SCROLL_PX = 60;
const CLICK_PX = 4;
const WHEEL_ZOOM = 0.0022;
const PIXELS_PER_LINE = 16;

const KEYS = [
  ["W  S", "zoom in and out at the pointer", "ws"],
  ["A  D   ← →", "move earlier and later", "ad"],
  ["↑ ↓", "scroll the tracks"],
  ["Ctrl + wheel, or wheel over the ruler", "zoom at the pointer"],
  ["Wheel, Shift + wheel", "scroll the tracks, move in time"],
  ["Drag", "move"],
  ["Shift + drag, or drag the ruler", "select a range and add it up; F zooms to it"],
  ["M", "select the range of the selected slice, else of the view"],
  ["Double click, Home", "fit the whole run"],
  ["T", "fit the steps"],
  ["Click, [ ]", "select a slice, its neighbours in the row"],
  ["F", "fit the selection"],
  ["/", "search; Enter next, Shift + Enter previous"],
  ["Z", "fold or open all ranks"],
  ["P, or the circle behind a lane's name", "pin the lane to the top, unpin it"],
  [",  .", "previous and next step of both runs, where two are compared"],
  ["Esc", "clear the selection"],
  ["?", "this list"],
];

/** What each key does, by KeyboardEvent.key in lower case. */
const ACTIONS = {
  w: (timeline) => timeline.zoom(ZOOM_STEP),
  "+": (timeline) => timeline.zoom(ZOOM_STEP),
  "=": (timeline) => timeline.zoom(ZOOM_STEP),
  s: (timeline) => timeline.zoom(1 / ZOOM_STEP),
  "-": (timeline) => timeline.zoom(1 / ZOOM_STEP),
  a: (timeline) => timeline.pan(-PAN_SHARE),
  arrowleft: (timeline) => timeline.pan(-PAN_SHARE),
  d: (timeline) => timeline.pan(PAN_SHARE),
  arrowright: (timeline) => timeline.pan(PAN_SHARE),
  arrowup: (timeline) => timeline.scrollBy(-SCROLL_PX),
  arrowdown: (timeline) => timeline.scrollBy(SCROLL_PX),
  pageup: (timeline) => timeline.scrollBy(-timeline.heightPx / 2),
  pagedown: (timeline) => timeline.scrollBy(timeline.heightPx / 2),
  home: (timeline) => timeline.fitAll(),
  0: (timeline) => timeline.fitAll(),
  f: (timeline) => timeline.fitSelected(),
  t: (timeline) => timeline.fitSteps(),
  m: (timeline) => rangeOfSelection(timeline),
  z: (timeline) => timeline.toggleAll(),
  p: (timeline) => pinSelected(timeline),
  ",": (timeline) => stepBoth(timeline, -1),
  ".": (timeline) => stepBoth(timeline, 1),
  "[": (timeline) => timeline.selectNeighbour(-1),
  "]": (timeline) => timeline.selectNeighbour(1),
  "/": (timeline) => timeline.panel.focusSearch(),
  "?": (timeline) => timeline.panel.toggleHelp(),
  escape: (timeline) => timeline.clearSelection(),
};

function listen(timeline) {
  const { canvas, root, scroller } = timeline;
  root.addEventListener("keydown", (event) => onKey(timeline, event));
  canvas.addEventListener("wheel", (event) => onWheel(timeline, event), { passive: false });
  canvas.addEventListener("pointerdown", (event) => onDown(timeline, event));
  canvas.addEventListener("pointermove", (event) => onMove(timeline, event));
  canvas.addEventListener("pointerup", (event) => onUp(timeline, event));
  canvas.addEventListener("pointercancel", () => (timeline.drag = null));
  canvas.addEventListener("pointerleave", () => timeline.panel.hideTip());
  canvas.addEventListener("dblclick", (event) => onDouble(timeline, event));
  scroller.addEventListener("scroll", () => timeline.scrolled());
}

function onKey(timeline, event) {
  const isTyping = event.composedPath()[0] instanceof HTMLInputElement;
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const action = ACTIONS[event.key.toLowerCase()];
  if (!action) return;
  // Streamlit has shortcuts, such as R and C.
  event.preventDefault();
  event.stopPropagation();
  action(timeline);
}

function onWheel(timeline, event) {
  const { x, y } = pointOf(timeline, event);
  const unitPx = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? PIXELS_PER_LINE : 1;
  const [horizontal, vertical] = event.shiftKey && !event.deltaX ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
  if (event.ctrlKey || event.metaKey || (y < timeline.headPx && !horizontal)) {
    event.preventDefault();
    timeline.zoom(Math.exp(clamp(vertical * unitPx, -400, 400) * WHEEL_ZOOM), timeline.nsAt(x));
  } else if (horizontal) {
    event.preventDefault();
    timeline.pan((horizontal * unitPx) / (timeline.widthPx - GUTTER_PX));
  }
}

function onDown(timeline, event) {
  if (event.button !== 0) return;
  const { x, y } = pointOf(timeline, event);
  timeline.root.focus({ preventScroll: true });
  timeline.canvas.setPointerCapture(event.pointerId);
  const isMeasuring = x >= GUTTER_PX && (event.shiftKey || y < RULER_PX);
  timeline.drag = { x, y, lastX: x, lastY: y, isMeasuring, fromNs: timeline.nsAt(x), hasMoved: false };
  timeline.panel.hideTip();
}

function onMove(timeline, event) {
  const point = pointOf(timeline, event);
  timeline.pointer = point;
  const { drag } = timeline;
  if (!drag) return onHover(timeline, point);
  drag.hasMoved ||= Math.hypot(point.x - drag.x, point.y - drag.y) > CLICK_PX;
  if (!drag.hasMoved) return;
  if (drag.isMeasuring) {
    selectRange(timeline, drag.fromNs, timeline.nsAt(point.x), { complete: false });
  } else {
    timeline.pan((drag.lastX - point.x) / (timeline.widthPx - GUTTER_PX));
    timeline.scroller.scrollTop += drag.lastY - point.y;
  }
  [drag.lastX, drag.lastY] = [point.x, point.y];
}

function onUp(timeline, event) {
  const { drag } = timeline;
  timeline.drag = null;
  if (drag && !drag.hasMoved) onClick(timeline, pointOf(timeline, event));
  else if (drag?.isMeasuring && timeline.range) requestTotals(timeline);
}

function onClick(timeline, point) {
  const area = areaAt(timeline, point);
  const line = point.y >= area.headPx ? area.layout.lineAt(area.contentY(point.y)) : null;
  if (isPin(line, point)) return togglePin(timeline, line.track);
  if (line?.key && (point.x < GUTTER_PX || line.type === "group")) return timeline.fold(line.key);
  const end = arrowEndAt(timeline, point);
  if (end) return timeline.goToSlice(end.slice);
  const mark = findingAt(timeline, point);
  if (mark) return timeline.goToFinding(mark);
  const slice = timeline.sliceAt(point);
  slice ? timeline.select(slice) : timeline.clearSelection();
}

/** Whether a point is on the mark at the end of a lane's label that pins it. */
function isPin(line, point) {
  return line?.type === "track" && point.x < GUTTER_PX && point.x >= GUTTER_PX - PIN_PX;
}

function onDouble(timeline, event) {
  const point = pointOf(timeline, event);
  if (point.x < GUTTER_PX) return;
  const slice = timeline.sliceAt(point);
  slice ? timeline.fit(slice) : timeline.fitAll();
}

function onHover(timeline, point) {
  const mark = findingAt(timeline, point);
  const slice = mark ? null : timeline.sliceAt(point);
  const area = areaAt(timeline, point);
  const line = point.y >= area.headPx ? area.layout.lineAt(area.contentY(point.y)) : null;
  const isLabel = line && point.x < GUTTER_PX;
  const isLink = mark || arrowEndAt(timeline, point) || isPin(line, point) || (line?.key && isLabel);
  timeline.canvas.style.cursor = isLink || slice ? "pointer" : point.y < RULER_PX ? "text" : "grab";
  if (mark) timeline.panel.showTip(point, [mark.finding, mark.title, durationText(mark.end - mark.start)]);
  else if (slice) timeline.panel.showTip(point, aboutSlice(timeline, slice));
  else if (isPin(line, point)) timeline.panel.showTip(point, [timeline.pinned.has(line.track.track) ? "Unpin this lane (P)" : "Pin this lane to the top (P)"]);
  else if (isLabel) timeline.panel.showTip(point, [line.label]);
  else timeline.panel.hideTip();
}

function findingAt(timeline, { x, y }) {
  if (y < RULER_PX || y >= timeline.headPx) return null;
  const row = Math.floor((y - RULER_PX) / FINDING_PX);
  const ofRow = timeline.findings.filter((mark) => mark.row === row);
  if (x < GUTTER_PX) return ofRow[0];
  return ofRow.find((mark) => x >= timeline.xOf(mark.start) - 2 && x <= Math.max(timeline.xOf(mark.end), timeline.xOf(mark.start) + 4));
}

function arrowEndAt(timeline, { x, y }) {
  return timeline.arrowEnds.find((end) => Math.hypot(end.x - x, end.y - y) <= ARROW_END_PX + 3 && !isSame(end.slice, timeline.selected ?? {}));
}

/** The lines of the tooltip of a slice. */
function aboutSlice(timeline, slice) {
  const track = timeline.trackOf(slice.track);
  const place = `${timeline.rankName(track.rank)} · ${track.group} · ${track.label}`;
  const time = `${durationText(slice.dur)} from ${timeline.moment(slice.start)}`;
  if (slice.id !== MERGED) return [slice.name, time, place];
  const busy = Math.round((100 * slice.fill) / 255);
  const merged = `${slice.count.toLocaleString("en")} slices too short to draw, busy ${busy}% of the time`;
  return [slice.name, merged, time, place];
}

function pointOf(timeline, event) {
  const box = timeline.canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}
