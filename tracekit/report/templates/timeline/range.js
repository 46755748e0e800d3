// A range of time: measured with the mouse or a key, summed up by the server, and carried by the address with a note.

const MAX_NOTE = 200;
const NO_TOTALS = "Adding up …";

/** Select a range, in ns of the run, and request what it contains once it is `complete`. */
function selectRange(timeline, fromNs, toNs, { complete = true, note = "" } = {}) {
  const [from, to] = [Math.min(fromNs, toNs), Math.max(fromNs, toNs)].map((ns) => Math.round(clamp(ns, 0, timeline.spanNs)));
  if (to <= from) return;
  timeline.range = { from, to, note };
  timeline.panel.announce(`Range from ${timeline.moment(from)} to ${timeline.moment(to)} (${durationText(to - from)})`);
  if (complete) requestTotals(timeline);
  timeline.redraw();
}

/** The range of the selected slice, else of the whole view. */
function rangeOfSelection(timeline) {
  const { selected, view } = timeline;
  if (selected) selectRange(timeline, selected.start, selected.start + Math.max(selected.dur, 1));
  else selectRange(timeline, view.from, view.to);
}

function requestTotals(timeline) {
  const { from, to, note } = timeline.range;
  clearTimeout(timeline.totalsTimer);
  keepInAddress(timeline, { [timeline.parameter("range")]: `${from}-${to}`, [timeline.parameter("note")]: note });
  timeline.root.dataset.totals = "";
  timeline.panel.showRange(timeline.range, null);
  timeline.resize();
  timeline.rangeNumber = (timeline.rangeNumber ?? 0) + 1;
  timeline.send("range", { start: from, end: to, number: timeline.rangeNumber, scene: timeline.scene });
}

/** Show the totals that the server sent, if they are of the current range; ask again while it reads the rates. */
function receiveTotals(timeline, totals) {
  const { panel, range, root } = timeline;
  if (!range || !totals || totals.start !== range.from || totals.end !== range.to) return;
  // Another selection may have taken the panel meanwhile.
  if (!panel.isOfRange || root.dataset.totals === "shown") return;
  const state = totals.is_reading ? `${totals.tables.length} tables` : "shown";
  if (root.dataset.totals !== state) panel.showRange(range, totals);
  root.dataset.totals = state;
  clearTimeout(timeline.totalsTimer);
  if (!totals.is_reading) return;
  timeline.totalsTimer = setTimeout(() => {
    timeline.rangeNumber += 1;
    timeline.send("range", { start: range.from, end: range.to, number: timeline.rangeNumber, scene: timeline.scene });
  }, RETRY_MS);
}

function clearRange(timeline) {
  if (!timeline.range) return;
  clearTimeout(timeline.totalsTimer);
  timeline.range = null;
  timeline.root.dataset.totals = "";
  keepInAddress(timeline, { [timeline.parameter("range")]: null, [timeline.parameter("note")]: null });
  timeline.send("range", null);
}

/** Select the range that the address names. */
function openLinkedRange(timeline) {
  const parameters = new URLSearchParams(address.read());
  const found = /^(\d{1,16})-(\d{1,16})$/.exec(parameters.get(timeline.parameter("range")) ?? "");
  if (!found) return;
  const note = (parameters.get(timeline.parameter("note")) ?? "").slice(0, MAX_NOTE);
  selectRange(timeline, Number(found[1]), Number(found[2]), { note });
}

/** The elements of the panel of a range: its note, and its totals once they are there. */
function rangeParts(timeline, range, totals) {
  const note = make("input", { class: "note", maxlength: MAX_NOTE, placeholder: "Note, carried by the link", "aria-label": "Note on the range" });
  note.value = range.note;
  note.addEventListener("input", () => {
    range.note = note.value;
    keepInAddress(timeline, { [timeline.parameter("note")]: note.value });
    timeline.redraw();
  });
  const zoom = make("button", { type: "button", onclick: () => timeline.fitSpan(range.from, range.to, 1) }, "Zoom to the range");
  const head = make("div", { class: "tools" }, note, zoom);
  if (!totals) return [head, make("p", { class: "waiting" }, NO_TOTALS)];
  return [head, ...totals.tables.flatMap((table) => tableParts(table)), ...totals.notes.map((text) => make("p", {}, text))];
}

function tableParts({ title, header, rows }) {
  const cells = (row, tag) => row.map((text, at) => make(at === 0 && tag === "td" ? "th" : tag, at === 0 && tag === "td" ? { scope: "row" } : tag === "th" ? { scope: "col" } : {}, text));
  const head = make("thead", {}, make("tr", {}, ...cells(header, "th")));
  const body = make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row, "td"))));
  const scroller = make("div", { class: "totals", tabindex: 0, role: "region", "aria-label": title }, make("table", {}, head, body));
  return [make("h5", {}, title), scroller];
}
