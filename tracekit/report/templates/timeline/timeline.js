// The timeline: the view, the selection, and the messages to and from the server.

const REQUEST_TIMEOUT_MS = 8000;
const SETTLED_MS = 350;
const RETRY_MS = 400;
const CONTEXT = 4; // a slice that is jumped to fills a quarter of the view
const STEPS_CONTEXT = 1.06;
const MAX_DPR = 3;
const MIN_HEIGHT_PX = 320;
const MAX_SCREEN_RATIO = 0.66;

class Timeline {
  constructor(root, send) {
    Object.assign(this, { root, send, view: null, tile: null, whole: null, selected: null, range: null, drag: null });
    Object.assign(this, { matches: null, matchAt: -1, arrows: [], arrowEnds: [], findings: [], finding: null });
    Object.assign(this, { seq: 0, pending: null, changedAt: null, settling: 0, lastJump: null, pointer: null, frame: 0, scrolledPx: 0 });
    this.canvas = root.querySelector(".scroller canvas");
    this.scroller = root.querySelector(".scroller");
    this.spacer = root.querySelector(".spacer");
    this.ctx = this.canvas.getContext("2d");
    this.panel = new Panel(this);
    this.map = new Minimap(this);
    this.sizes = new ResizeObserver(() => requestAnimationFrame(() => this.resize()));
    this.sizes.observe(this.scroller);
    this.inAddress = new Map();
    this.addressTimer = setInterval(() => restoreAddress(this), RESTORE_MS);
    listen(this);
  }

  // Messages from the server ------------------------------------------------------------------------------------------

  receive(data) {
    this.setFindings(data.findings);
    if (data.scene !== this.scene) {
      if (!data.tracks) return this.requestScene();
      this.setScene(data);
    }
    this.finding = data.finding;
    this.inks = themeColours(this.root, data.colours);
    this.setTile(data.tile);
    this.setMatches(data.matches);
    this.setDetails(data);
    receiveTotals(this, data.range);
    if (data.go && data.go.nonce !== this.lastJump) this.jumpTo(data.go);
    this.redraw();
  }

  setScene(data) {
    const before = this.layout;
    this.inAddress.clear();
    this.scene = data.scene;
    this.pair = data.pair ?? null;
    this.zeroNs = this.pair?.zero ?? 0;
    this.spanNs = data.span_ns;
    this.tracks = new Map(data.tracks.map((track) => [track.track, track]));
    this.roles = [];
    for (const track of data.tracks) this.roles[track.track] = track.role;
    this.kinds = data.kinds;
    this.layout = this.pair ? new PairLayout(data.tracks, data.unit_ranks, this.pair.names) : new Layout(data.tracks, data.unit_ranks, data.places);
    this.pinned = new PinnedLayout();
    pinLinked(this);
    this.steps = data.steps;
    this.overview = data.overview;
    this.view = withinRun(data.view, this.spanNs);
    this.tile = this.whole = this.pending = this.matches = null;
    this.seq = data.tile.seq;
    this.shown = new Set();
    this.panel.showStatus("");
    this.panel.offerSteps(Boolean(this.steps));
    if (before) replaceScene(this, before);
    this.resize();
    if (!before) openLinkedRange(this);
  }

  setFindings(findings) {
    this.findings = assignRows(findings);
    this.findingRows = [];
    for (const { row, finding } of this.findings) this.findingRows[row] ??= finding;
    const keys = new Set(this.findings.map((mark) => mark.key));
    if (keys.size > MAX_FINDING_ROWS) this.findingRows[MAX_FINDING_ROWS - 1] = "other findings";
  }

  setTile(packed) {
    if (this.tile && packed.seq <= this.tile.seq) return;
    this.tile = new Tile(packed);
    if (this.tile.from <= 0 && this.tile.to >= this.spanNs) this.whole = this.tile;
    this.addToLegend(this.tile.kind);
    if (this.pending && packed.seq >= this.pending.seq) this.pending = null;
    if (!this.pending) this.requestTile();
  }

  /** The legend lists the kinds shown so far, so that it does not change with every zoom. */
  addToLegend(kinds) {
    const before = this.shown.size;
    for (const kind of kinds) this.shown.add(kind);
    if (this.shown.size > before) this.panel.showLegend(this.kinds.filter((_, number) => this.shown.has(number)));
  }

  setMatches(found) {
    if (!found) this.matches = null;
    else if (found.text !== this.matches?.text) {
      this.matches = { ...found, ...found.columns };
      this.matchAt = -1;
    }
    this.panel.showCount(this.countText());
  }

  setDetails({ details, arrows, selected }) {
    const isShown = this.root.dataset.details === "shown";
    if (!this.selected || isShown || this.panel.isOfRange || !isSame(this.selected, selected ?? {})) return;
    if (!details) return this.retryDetails();
    this.arrows = arrows;
    this.panel.showDetails(this.selected, details, arrows);
    this.root.dataset.details = "shown";
  }

  /** The server is still reading the tables of that rank; meanwhile the timeline can be moved. */
  retryDetails() {
    clearTimeout(this.retryTimer);
    this.retryTimer = setTimeout(() => {
      if (this.selected && this.selected.id !== MERGED) this.sendSelection(this.selected);
    }, RETRY_MS);
  }

  jumpTo(go) {
    this.lastJump = go.nonce;
    // The button that leads here is gone with its page, and the focus with it: the next key is for the timeline.
    if (document.activeElement === document.body) this.root.focus({ preventScroll: true });
    if (go.slice) return this.goToSlice(go.slice), this.changed();
    this.view = withinRun({ from: go.start, to: go.end }, this.spanNs);
    const track = this.tracks.get(go.track);
    if (go.ranks?.length) this.lead(go.ranks);
    if (track) this.reveal(track);
    const mark = this.findings.find((mark) => mark.key === go.finding && mark.start < go.end && mark.end > go.start);
    if (go.selected) this.select({ kind: 0, count: 1, fill: 255, ...go.selected, mark });
    else if (mark) this.panel.showFinding(mark);
    this.changed();
  }

  // Requests to the server --------------------------------------------------------------------------------------------

  /** Redraw at once; request a tile if the view needs one, else send the view when it has settled. */
  changed() {
    this.changedAt = performance.now();
    this.root.dataset.sharp = false;
    this.redraw();
    this.requestTile();
  }

  requestTile() {
    clearTimeout(this.settling);
    const isWaiting = this.pending && performance.now() - this.pending.sentAt < REQUEST_TIMEOUT_MS;
    if (isWaiting || !this.view || this.sentAddress === this.address()) return;
    if (this.isSharp()) this.settling = setTimeout(() => this.sendView(), SETTLED_MS);
    else this.sendView();
  }

  /** Send the view. One request at a time: the answer to the latest matters more than a queue of old ones. */
  sendView() {
    if (!this.root.isConnected) return;
    this.seq += 1;
    this.sentAddress = this.address();
    this.pending = { seq: this.seq, sentAt: performance.now() };
    const [start, end] = [Math.floor(this.view.from), Math.ceil(this.view.to)];
    showInAddress({ [this.parameter("from")]: start, [this.parameter("to")]: end });
    const pixels = Math.round(this.plotPx() * Math.min(this.dpr, 2));
    this.send("view", { seq: this.seq, start, end, pixels, tracks: this.tracksAround(1), lastJump: this.lastJump, scene: this.scene });
  }

  /** The server assumes that this timeline has the scene, as the previous one had. */
  requestScene() {
    this.send("view", { seq: this.seq, scene: null });
  }

  isSharp() {
    return Boolean(this.tile?.covers(this.view, this.tracksAround(0)) && this.tile.isSharp(this.nsPerPx()));
  }

  /** The tracks on the screen, and those within so many screens above and below. */
  tracksAround(screens) {
    const visiblePx = this.heightPx - this.headPx;
    const { scrollTop } = this.scroller;
    const scrolled = this.layout.tracksBetween(scrollTop - screens * visiblePx, scrollTop + (1 + screens) * visiblePx);
    return [...new Set([...this.pinned.lineOfTrack.keys(), ...scrolled])];
  }

  address() {
    const rows = [this.scroller.scrollTop, this.layout.heightPx, this.pinned.heightPx];
    return [Math.floor(this.view.from), Math.ceil(this.view.to), this.plotPx(), this.lastJump, ...rows].join(" ");
  }

  /** The name of a parameter of the address: two runs side by side have their own. */
  parameter(name) {
    return this.pair ? `pair_${name}` : name;
  }

  rankName(rank) {
    return this.pair?.names[rank] ?? `rank ${rank}`;
  }

  /** A moment counted from where times are 0: the run's start, or that of the steps of two runs. */
  moment(ns) {
    return momentText(ns - this.zeroNs);
  }

  // Positions ---------------------------------------------------------------------------------------------------------

  plotPx() {
    return Math.max(this.widthPx - GUTTER_PX, 100);
  }

  nsPerPx() {
    return (this.view.to - this.view.from) / this.plotPx();
  }

  xOf(ns) {
    return GUTTER_PX + (ns - this.view.from) / this.nsPerPx();
  }

  nsAt(x) {
    return this.view.from + (x - GUTTER_PX) * this.nsPerPx();
  }

  yOf(contentPx) {
    return this.headPx + contentPx - this.scrolledPx;
  }

  contentY(y) {
    return y - this.headPx + this.scrolledPx;
  }

  trackOf(track) {
    return this.tracks.get(track) ?? { rank: "?", group: "", label: "", role: "" };
  }

  sliceAt(point) {
    const area = areaAt(this, point);
    if (!this.tile || point.x < GUTTER_PX || point.y < area.headPx) return null;
    const y = area.contentY(point.y);
    const reachNs = this.nsPerPx();
    const at = this.nsAt(point.x);
    for (let i = this.tile.length - 1; i >= 0; i--) {
      if (this.tile.start[i] > at + reachNs || this.tile.start[i] + this.tile.dur[i] < at - reachNs) continue;
      const place = area.layout.placeOf(this.tile.track[i], this.tile.row[i], this.roles[this.tile.track[i]]);
      if (place && y >= place.y && y < place.y + place.heightPx) return this.tile.slice(i);
    }
    return null;
  }

  // Actions -----------------------------------------------------------------------------------------------------------

  zoom(factor, atNs) {
    const at = atNs ?? (this.pointer && this.pointer.x > GUTTER_PX ? this.nsAt(this.pointer.x) : (this.view.from + this.view.to) / 2);
    this.view = zoomed(this.view, factor, at, this.spanNs);
    this.changed();
  }

  pan(share) {
    this.view = panned(this.view, share, this.spanNs);
    this.changed();
  }

  scrollBy(px) {
    this.scroller.scrollTop += px;
  }

  fitAll() {
    this.view = { from: 0, to: this.spanNs };
    this.changed();
  }

  fitSteps() {
    if (this.steps) this.fitSpan(...this.steps, STEPS_CONTEXT);
  }

  fitSelected() {
    if (this.range) this.fitSpan(this.range.from, this.range.to, 1);
    else if (this.selected) this.fit(this.selected);
    else this.fitAll();
  }

  fit(slice) {
    this.fitSpan(slice.start, slice.start + slice.dur, 1.1);
  }

  fitSpan(from, to, factor) {
    const middle = (from + to) / 2;
    const half = (Math.max(to - from, MIN_VIEW_NS) * factor) / 2;
    this.view = withinRun({ from: middle - half, to: middle + half }, this.spanNs);
    this.changed();
  }

  fold(key) {
    this.layout.toggle(key);
    this.resize();
    this.changed();
  }

  toggleAll() {
    this.layout.toggleAll();
    this.resize();
    this.changed();
  }

  scrolled() {
    if (!this.layout) return;
    this.redraw();
    if (!this.isSharp()) this.changed();
  }

  select(slice) {
    this.selected = slice;
    this.arrows = [];
    this.root.dataset.details = "";
    this.panel.showDetails(slice, null, []);
    this.panel.announce(aboutSlice(this, slice).join(", "));
    this.resize();
    if (slice.id === MERGED) this.send("selected", null);
    else this.sendSelection(slice);
  }

  /** With a new number each time: Streamlit does not deliver a message that equals the previous one. */
  sendSelection({ track, row, id }) {
    this.selections = (this.selections ?? 0) + 1;
    this.send("selected", { track, row, id, number: this.selections });
  }

  clearSelection() {
    if (!this.panel.help.hidden) return this.panel.toggleHelp();
    const hadSelection = this.selected;
    clearRange(this);
    Object.assign(this, { selected: null, arrows: [] });
    this.panel.showDetails(null);
    this.resize();
    if (hadSelection) this.send("selected", null);
  }

  selectNeighbour(direction) {
    const at = this.selected ?? this.firstInView();
    if (!at || !this.tile) return;
    const next = this.selected ? this.tile.neighbour(at.track, at.row, at.start, direction) : at;
    if (next) this.goToSlice(next);
  }

  firstInView() {
    for (let i = 0; i < (this.tile?.length ?? 0); i++) {
      const isIn = this.tile.start[i] >= this.view.from && this.tile.start[i] < this.view.to;
      if (isIn && this.tile.id[i] !== MERGED && this.layout.lineOfTrack.has(this.tile.track[i])) return this.tile.slice(i);
    }
    return null;
  }

  /** Bring a slice into view, zooming no more than needed, and select it. */
  goToSlice(slice) {
    const track = this.tracks.get(slice.track);
    if (track) this.reveal(track, slice.row);
    const length = this.view.to - this.view.from;
    const isSmall = slice.dur < length / 200;
    const wantedNs = isSmall || slice.dur > length ? Math.max(slice.dur, 1) * CONTEXT * (isSmall ? 5 : 1) : length;
    const isVisible = slice.start >= this.view.from && slice.start + slice.dur <= this.view.to;
    if (wantedNs !== length || !isVisible) {
      const middle = slice.start + slice.dur / 2;
      this.view = withinRun({ from: middle - wantedNs / 2, to: middle + wantedNs / 2 }, this.spanNs);
      this.changed();
    }
    this.select({ kind: 0, count: 1, fill: 255, ...slice });
  }

  goToFinding(mark) {
    this.finding = mark.key;
    this.send("finding", mark.key);
    this.fitSpan(mark.start, mark.end, 3);
    this.panel.showFinding(mark);
    this.resize();
  }

  find(text) {
    this.panel.showCount(!text ? "" : text === this.matches?.text ? this.countText() : "…");
    this.send("search", { text });
  }

  /** Go to the next (1) or previous (-1) match, starting with the first one in view. */
  stepMatch(direction) {
    const count = this.matches?.start.length ?? 0;
    if (!count) return;
    if (this.matchAt < 0) {
      const first = this.matches.start.findIndex((start) => start >= this.view.from);
      this.matchAt = direction > 0 ? Math.max(first, 0) : (first > 0 ? first : count) - 1;
    } else {
      this.matchAt = (this.matchAt + direction + count) % count;
    }
    const at = this.matchAt;
    const { track, row, id, start, dur, names } = this.matches;
    this.goToSlice({ track: track[at], row: row[at], id: id[at], start: start[at], dur: dur[at], name: names[this.matches.name[at]] });
    this.panel.showCount(this.countText());
  }

  countText() {
    if (!this.matches) return "";
    const { total } = this.matches;
    if (!total) return "no match";
    const totalText = total.toLocaleString("en");
    const shown = this.matches.start.length;
    const at = this.matchAt < 0 ? "" : `${(this.matchAt + 1).toLocaleString("en")} of `;
    return `${at}${totalText} · ${durationText(this.matches.total_ns)}${shown < total ? ` (first ${shown.toLocaleString("en")} shown)` : ""}`;
  }

  lead(ranks) {
    this.layout.lead(ranks);
    this.root.dataset.lead = ranks.join(" ");
    this.resize();
    this.scroller.scrollTop = 0;
  }

  reveal(track, row = 0) {
    if (this.layout.lineOfTrack.get(track.track)?.type !== "track") this.layout.reveal(track);
    this.resize();
    const line = this.layout.lineOfTrack.get(track.track);
    if (!line) return;
    const top = line.y + row * ROW_PX;
    const visiblePx = this.heightPx - this.headPx;
    const { scrollTop } = this.scroller;
    if (top < scrollTop || top + ROW_PX > scrollTop + visiblePx) this.scroller.scrollTop = Math.max(top - visiblePx / 3, 0);
  }

  // Drawing -----------------------------------------------------------------------------------------------------------

  resize() {
    if (!this.layout) return;
    this.headPx = RULER_PX + this.findingRows.length * FINDING_PX + 1 + this.pinned.heightPx;
    const contentPx = this.headPx + this.layout.heightPx;
    this.heightPx = clamp(contentPx, MIN_HEIGHT_PX, Math.max(MIN_HEIGHT_PX, window.innerHeight * MAX_SCREEN_RATIO));
    this.scroller.style.height = `${this.heightPx}px`;
    this.spacer.style.height = `${Math.max(contentPx - this.heightPx, 0)}px`;
    this.widthPx = this.scroller.clientWidth;
    this.dpr = Math.min(window.devicePixelRatio || 1, MAX_DPR);
    this.sizeCanvas(Math.round(this.widthPx * this.dpr), Math.round(this.heightPx * this.dpr));
    this.redraw();
  }

  sizeCanvas(width, height) {
    // Setting a size, even the same one, clears the canvas.
    if (this.canvas.width !== width) this.canvas.width = width;
    if (this.canvas.height !== height) this.canvas.height = height;
    this.canvas.style.height = `${this.heightPx}px`;
  }

  redraw() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      if (!this.tile || !this.inks || !this.widthPx) return;
      // Read once: it may force a layout, and every slice needs it.
      this.scrolledPx = this.scroller.scrollTop;
      this.ticks = ticks(this.view, this.plotPx(), this.zeroNs);
      this.report(paint(this));
      this.map.paint();
    });
  }

  close() {
    this.sizes.disconnect();
    clearInterval(this.addressTimer);
  }

  /** Report what is drawn to tests, benchmarks and other programs. */
  report(drawn) {
    const { dataset } = this.root;
    const now = performance.now();
    const view = { from: Math.floor(this.view.from), to: Math.ceil(this.view.to), seq: this.tile.seq, requested: this.seq };
    Object.assign(dataset, view, { rectangles: drawn, arrows: this.arrows.length, matches: this.matches?.total ?? "", match: this.matchAt + 1 });
    dataset.selected = this.selected ? `${this.selected.track}/${this.selected.row}/${this.selected.id}` : "";
    dataset.range = this.range ? Math.round(this.range.to - this.range.from) : "";
    Object.assign(dataset, { steps: this.pair?.steps.join(" / ") ?? "", zero: Math.round(this.zeroNs) });
    dataset.pinned = this.pinned.tracks.map((track) => track.track).join(" ");
    const isSharp = this.isSharp();
    dataset.sharp = isSharp;
    dataset.paintedMs ??= now.toFixed(1);
    if (isSharp && this.changedAt) {
      dataset.latencyMs = (now - this.changedAt).toFixed(1);
      dataset.redraws = 1 + Number(dataset.redraws ?? 0);
      this.changedAt = null;
    }
    dataset.left = GUTTER_PX;
    dataset.frameMs = (performance.now() - now).toFixed(2);
  }
}

function isSame(one, other) {
  return one.track === other.track && one.row === other.row && one.id === other.id;
}

// Streamlit calls this function when the component appears, and again with each message.
const timelines = new WeakMap();

export default function ({ data, parentElement, setStateValue }) {
  const root = parentElement.querySelector(".timeline");
  if (!root || !data) return undefined;
  const timeline = entry(timelines, root, () => new Timeline(root, setStateValue));
  timeline.send = setStateValue;
  timeline.receive(unpacked(data));
  return () => timeline.close();
}
