// In place of the server: answers the timeline from the data that the page holds, which embedding.py made.

const MARGIN_SHARE = 0.3; // as in message.py
const FIRST_PIXELS = 1200;
const MIN_BAND_PX = { step: 3, unit: 6 };
const MAX_MATCHES = 1000;
const ELSEWHERE = "Stack, shapes and the other ranks of a collective are in the dashboard, not in this file";
const NOT_ADDED_UP = "This file has the totals of the range that it was shared with only.";

class EmbeddedScene {
  constructor(bytes) {
    const headLength = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
    this.head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headLength)));
    const body = bytes.subarray(4 + headLength);
    const columns = (places, count) => Object.fromEntries(Object.entries(places).map(([name, place]) => [name, numbersOf(body, place, count)]));
    this.segments = columns(this.head.segments.columns, this.head.segments.length);
    this.items = columns(this.head.items.columns, this.head.items.length);
    this.bands = columns(this.head.bands.columns, this.head.bands.length);
    this.placeItems();
  }

  /** The starts from the distances between them, and the segment of each item. */
  placeItems() {
    const { first_start: firstStart, count } = this.segments;
    const { start } = this.items;
    this.firstOf = new Uint32Array(count.length + 1);
    this.segmentOf = new Uint32Array(start.length);
    for (let segment = 0; segment < count.length; segment++) {
      const first = this.firstOf[segment];
      this.firstOf[segment + 1] = first + count[segment];
      for (let i = first; i < first + count[segment]; i++) {
        start[i] += i === first ? firstStart[segment] : start[i - 1];
        this.segmentOf[i] = segment;
      }
    }
  }

  /** The message of the server to what the browser has sent. */
  answer({ view, search, finding, range, selected }) {
    const details = selected && [{ label: "more", value: ELSEWHERE, slice: null }];
    return {
      ...this.head.scene,
      view: this.head.view,
      findings: this.head.findings,
      finding: finding ?? this.head.finding,
      tile: this.tile(view),
      matches: search?.text.trim() ? this.matches(search.text) : null,
      range: range ? this.totals(range) : null,
      go: null,
      selected: selected ?? null,
      details: details ?? null,
      arrows: [],
    };
  }

  tile({ seq, start, end, pixels, tracks }) {
    const margin = Math.trunc((end - start) * MARGIN_SHARE);
    const [from, to] = [Math.max(start - margin, 0), Math.min(end + margin, this.head.scene.span_ns)];
    const shownPx = Math.max(Math.round((pixels * (to - from)) / Math.max(end - start, 1)), 1);
    const shown = new Set(tracks);
    const found = this.standingAt(levelOf(from, to, shownPx), from, to, shown);
    const bands = this.bandsIn(from, to, (to - from) / shownPx, shown);
    return { seq, start: from, end: to, pixels: shownPx, tracks, names: this.head.names, labels: this.head.labels, columns: this.columnsOf(found), bands };
  }

  /** What stands at a level of detail and touches a window, by track, row and start: as viewport.py chooses it. */
  standingAt(level, from, to, tracks) {
    const { track, row, ends } = this.segments;
    const { start, dur, made } = this.items;
    const found = [];
    for (let segment = 0; segment < track.length; segment++) {
      if (ends[segment] <= level || !tracks.has(track[segment])) continue;
      const past = this.firstOf[segment + 1];
      for (let i = this.firstAfter(segment, from); i < past && start[i] < to; i++) {
        if (made[i] <= level) found.push(i);
      }
    }
    const by = (column, i) => column[this.segmentOf[i]];
    return found.sort((a, b) => by(track, a) - by(track, b) || by(row, a) - by(row, b) || start[a] - start[b] || dur[a] - dur[b]);
  }

  /** The first item of a segment that begins at a moment or ends after it. */
  firstAfter(segment, ns) {
    const { start, dur } = this.items;
    let [low, high] = [this.firstOf[segment], this.firstOf[segment + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] >= ns || start[middle] + dur[middle] > ns) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  columnsOf(found) {
    const { start, dur, name, count, fill } = this.items;
    const { track, row } = this.segments;
    const values = {
      track: (i) => track[this.segmentOf[i]],
      row: (i) => row[this.segmentOf[i]],
      start: (i) => start[i],
      dur: (i) => dur[i],
      name: (i) => name[i],
      id: (i) => (count[i] > 1 ? MERGED : i),
      kind: (i) => this.head.kind_of_name[name[i]],
      count: (i) => count[i],
      fill: (i) => fill[i],
    };
    return Object.fromEntries(Object.entries(values).map(([column, of]) => [column, TYPES[column].from(found, of)]));
  }

  bandsIn(from, to, nsPerPx, tracks) {
    const { rank, is_step: isStep, name, start, end } = this.bands;
    const ranks = new Set(this.head.scene.tracks.filter((track) => tracks.has(track.track)).map((track) => track.rank));
    const found = [];
    for (let i = 0; i < rank.length; i++) {
      const kind = isStep[i] ? "step" : "unit";
      const isWide = end[i] - start[i] >= MIN_BAND_PX[kind] * nsPerPx;
      if (!isWide || start[i] >= to || end[i] <= from || !ranks.has(rank[i])) continue;
      found.push({ rank: rank[i], kind, name: this.head.band_names[name[i]], start: start[i], end: end[i] });
    }
    return found;
  }

  /** The slices that the file holds by a part of their name; merged ones are not found. */
  matches(text) {
    const folded = text.trim().toLowerCase();
    const isWanted = this.head.names.map((name) => name.toLowerCase().includes(folded));
    const { start, dur, name, count } = this.items;
    const found = [];
    for (let i = 0; i < start.length; i++) if (count[i] === 1 && isWanted[name[i]]) found.push(i);
    const first = [...found].sort((a, b) => start[a] - start[b]).slice(0, MAX_MATCHES);
    const totalNs = found.reduce((sum, i) => sum + dur[i], 0);
    return { text, total: found.length, total_ns: totalNs, names: this.head.names, columns: this.columnsOf(first) };
  }

  totals({ start, end }) {
    const shared = this.head.range;
    if (shared?.start === start && shared.end === end) return shared;
    return { start, end, is_reading: false, tables: [], notes: [NOT_ADDED_UP] };
  }

  /** What to say of a view whose short slices are merged in the file; '' where all are there. */
  coarseness({ start, end, pixels }) {
    const { from, to, inside, outside } = this.head.detail;
    const isInside = start >= from && end <= to;
    const level = isInside ? inside : outside;
    if (levelOf(start, end, pixels) >= level) return "";
    const merged = `Slices shorter than ${durationText(2 ** level / 2)} are merged here`;
    return isInside || inside === outside ? merged : `${merged}; from ${momentText(from)} to ${momentText(to)} the file has more`;
  }
}

/** A column: its bytes by significance, all lowest ones first. */
function numbersOf(body, [at, length], count) {
  const values = new Float64Array(count);
  for (let plane = 0, scale = 1; plane * count < length; plane++, scale *= 256) {
    const first = at + plane * count;
    for (let i = 0; i < count; i++) values[i] += body[first + i] * scale;
  }
  return values;
}

function levelOf(from, to, pixels) {
  return Math.max(0, Math.ceil(Math.log2((to - from) / pixels)));
}

async function openEmbedded() {
  const root = document.getElementById("timeline").shadowRoot.querySelector(".timeline");
  const scene = new EmbeddedScene(await inflated(document.getElementById("timeline-data").textContent));
  let shown = `?${scene.head.address}`;
  address = { read: () => shown, write: (search) => (shown = `?${search}`) };
  const { from, to } = scene.head.view;
  const state = { view: { seq: 0, start: from, end: to, pixels: FIRST_PIXELS, tracks: scene.head.first_tracks } };
  const answer = () => {
    timeline.receive(scene.answer(state));
    timeline.panel.showStatus(scene.coarseness(state.view));
  };
  const timeline = new Timeline(root, (name, value) => {
    state[name] = value;
    setTimeout(answer);
  });
  answer();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", answer);
  addEventListener("beforeprint", () => print(timeline, true));
  addEventListener("afterprint", () => print(timeline, false));
}

/** Paint on a page of paper, in light colours, or on the screen again: at once, as nothing is painted later. */
function print(timeline, isOnPaper) {
  document.documentElement.classList.toggle("printed", isOnPaper);
  timeline.inks = themeColours(timeline.root, timeline.inks);
  timeline.resize();
  timeline.ticks = ticks(timeline.view, timeline.plotPx(), timeline.zeroNs);
  paint(timeline);
  timeline.map.paint();
}

openEmbedded();
