// Painting: draws the state of a `Timeline` on its canvas. Names are only drawn as text.

const GUTTER_PX = 172;
const RULER_PX = 26;
const FINDING_PX = 17;
const MAX_FINDING_ROWS = 6;
const MIN_LABEL_PX = 26;
const MIN_EDGE_PX = 14;
const CHARACTER_PX = 5.2;
const FONT = '11px "Source Sans", "Source Sans Pro", system-ui, sans-serif';
const BOLD = `600 12px "Source Sans", "Source Sans Pro", system-ui, sans-serif`;
const DARK_INK = "#10151c";
const ARROW_END_PX = 4;
const MAX_NOTE_CHARACTERS = 40;

/** Paint the whole timeline and return how many slices were drawn. */
function paint(timeline) {
  const { ctx, widthPx, heightPx, layout, headPx } = timeline;
  ctx.setTransform(timeline.dpr, 0, 0, timeline.dpr, 0, 0);
  ctx.clearRect(0, 0, widthPx, heightPx);
  ctx.font = FONT;
  ctx.textBaseline = "middle";
  ctx.save();
  clipTo(ctx, 0, headPx, widthPx, heightPx - headPx);
  paintGround(timeline);
  ctx.save();
  clipTo(ctx, GUTTER_PX, headPx, widthPx - GUTTER_PX, heightPx - headPx);
  paintBands(timeline);
  paintEvidence(timeline);
  const drawn = paintTiles(timeline);
  paintMarks(timeline);
  paintArrows(timeline);
  paintPair(timeline);
  ctx.restore();
  for (const line of layout.lines) paintLabel(timeline, line);
  ctx.restore();
  paintHead(timeline);
  paintPinned(timeline);
  paintRange(timeline);
  return drawn;
}

function clipTo(ctx, x, y, width, height) {
  ctx.beginPath();
  ctx.rect(x, y, width, height);
  ctx.clip();
}

function isVisible(timeline, y, heightPx) {
  return y + heightPx >= timeline.headPx && y <= timeline.heightPx;
}

function paintGround(timeline) {
  const { ctx, widthPx, layout, inks } = timeline;
  for (const line of layout.lines) {
    const y = timeline.yOf(line.y);
    if (!isVisible(timeline, y, line.heightPx)) continue;
    if (line.type === "rank" || line.type === "group") {
      ctx.fillStyle = line.type === "rank" ? inks.rankGround : inks.groupGround;
      ctx.fillRect(0, y, widthPx, line.heightPx - 1);
    }
    if (timeline.pair && line.type === "track" && line.rank === 1) {
      ctx.fillStyle = inks.groupGround;
      ctx.fillRect(0, y, widthPx, line.heightPx - 1);
    }
    ctx.fillStyle = inks.grid;
    ctx.fillRect(0, y + line.heightPx - 1, widthPx, 1);
  }
  ctx.fillStyle = inks.grid;
  for (const { atNs } of timeline.ticks.marks) ctx.fillRect(Math.round(timeline.xOf(atNs)), 0, 1, timeline.heightPx);
}

/** Steps in the line of their rank, units below it; the edge of a step crosses the tracks of the rank. */
function paintBands(timeline) {
  const { ctx, layout, inks } = timeline;
  const places = new Map();
  for (const line of layout.lines) if (line.type === "rank" || line.type === "units") places.set(`${line.type} ${line.rank}`, line);
  timeline.tile?.bands.forEach((band, number) => {
    const line = places.get(`${band.kind === "step" ? "rank" : "units"} ${band.rank}`);
    if (!line) return;
    const y = timeline.yOf(line.y);
    const edgePx = layout.partOfRank.get(band.rank).bottom - line.y;
    const [left, right] = [timeline.xOf(band.start), timeline.xOf(band.end)];
    if (!isVisible(timeline, y, edgePx) || right < GUTTER_PX || left > timeline.widthPx) return;
    ctx.fillStyle = isCompared(timeline, band) ? inks.range : band.kind === "step" ? inks.step : inks.unit;
    ctx.fillRect(left, y + 2, Math.max(right - left - 1, 0.5), line.heightPx - 5);
    ctx.fillStyle = inks.text;
    if (band.kind === "step") {
      ctx.fillStyle = inks.edge;
      if (right - left > MIN_EDGE_PX) ctx.fillRect(Math.round(left), y, 1, edgePx);
      ctx.fillStyle = inks.text;
    }
    label(timeline, fitting(band.name, right - left), left, right, y + line.heightPx / 2 - 0.5);
  });
}

/** A name, or only its last word, such as the number of a step, if there is no room for more. */
function fitting(name, px) {
  return name.length * CHARACTER_PX + 8 > px ? name.slice(name.lastIndexOf(" ") + 1) : name;
}

/** The current tile, and outside of it the tile of the whole run until the server has answered. */
function paintTiles(timeline) {
  const { ctx, tile, whole } = timeline;
  if (!tile) return 0;
  if (whole && whole !== tile && !tile.covers(timeline.view, [])) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(GUTTER_PX, 0, timeline.xOf(tile.from) - GUTTER_PX, timeline.heightPx);
    ctx.rect(timeline.xOf(tile.to), 0, timeline.widthPx, timeline.heightPx);
    ctx.clip();
    paintSlices(timeline, whole);
    ctx.restore();
  }
  return paintSlices(timeline, tile);
}

function paintSlices(timeline, tile) {
  const { ctx, view, kinds, layout } = timeline;
  const pxPerNs = (timeline.widthPx - GUTTER_PX) / (view.to - view.from);
  const labelled = [];
  let drawn = 0;
  for (let i = 0; i < tile.length; i++) {
    const place = layout.placeOf(tile.track[i], tile.row[i], timeline.roles[tile.track[i]]);
    if (!place) continue;
    const y = timeline.yOf(place.y);
    if (!isVisible(timeline, y, place.heightPx)) continue;
    const left = GUTTER_PX + (tile.start[i] - view.from) * pxPerNs;
    const width = tile.dur[i] * pxPerNs;
    if (left > timeline.widthPx || left + width < GUTTER_PX) continue;
    const kind = kinds[tile.kind[i]];
    // The opacity of merged slices is the share of time in which they are busy.
    ctx.globalAlpha = tile.id[i] === MERGED ? 0.3 + (0.6 * tile.fill[i]) / 255 : 1;
    ctx.fillStyle = kind.colour;
    ctx.fillRect(left, y, Math.max(width > 4 ? width - 0.7 : width, 0.6), place.heightPx);
    drawn++;
    if (width > MIN_LABEL_PX && place.heightPx > 10 && tile.id[i] !== MERGED) labelled.push([i, left, left + width, y, kind]);
  }
  ctx.globalAlpha = 1;
  for (const [i, left, right, y, kind] of labelled) {
    ctx.fillStyle = kind.pale ? DARK_INK : "#ffffff";
    const name = tile.name[i];
    label(timeline, tile.labels[name] ?? tile.names[name], left, right, y + ROW_PX / 2);
  }
  return drawn;
}

/** Write as much of a text as fits into the visible part between two edges. */
function label(timeline, text, left, right, y) {
  const from = Math.max(left, GUTTER_PX) + 4;
  const characters = Math.floor((Math.min(right, timeline.widthPx) - from - 2) / CHARACTER_PX);
  if (characters < 2) return;
  timeline.ctx.fillText(shortened(text, characters), from, y, characters * CHARACTER_PX + 4);
}

function shortened(text, characters) {
  return text.length > characters ? `${text.slice(0, characters - 1)}…` : text;
}

/** Findings as bands behind the tracks of their rank. */
function paintEvidence(timeline) {
  const { ctx, layout } = timeline;
  for (const mark of timeline.findings) {
    const part = layout.partOfRank.get(mark.rank);
    if (!part) continue; // of many ranks only some are drawn
    ctx.fillStyle = mark.colour ?? timeline.inks.evidence;
    const [left, right] = [timeline.xOf(mark.start), timeline.xOf(mark.end)];
    if (right < GUTTER_PX || left > timeline.widthPx) continue;
    ctx.globalAlpha = mark.key === timeline.finding ? 0.34 : 0.13;
    ctx.fillRect(left, timeline.yOf(part.top), Math.max(right - left, 1.5), part.bottom - part.top);
  }
  ctx.globalAlpha = 1;
}

/** Matches of the search, and the selected slice. */
function paintMarks(timeline) {
  const { inks, matches, selected } = timeline;
  for (let i = 0; i < (matches?.start.length ?? 0); i++) {
    outline(timeline, { track: matches.track[i], row: matches.row[i], start: matches.start[i], dur: matches.dur[i] }, inks.match, 1.5);
  }
  if (selected) outline(timeline, selected, inks.text, 2);
}

function outline(timeline, slice, colour, lineWidth) {
  const place = timeline.layout.placeOf(slice.track, slice.row, timeline.roles[slice.track]);
  if (!place) return;
  const [left, right] = [timeline.xOf(slice.start), timeline.xOf(slice.start + slice.dur)];
  const y = timeline.yOf(place.y);
  if (right < GUTTER_PX || left > timeline.widthPx || !isVisible(timeline, y, place.heightPx)) return;
  timeline.ctx.strokeStyle = colour;
  timeline.ctx.lineWidth = lineWidth;
  timeline.ctx.strokeRect(left, y, Math.max(right - left, 2), place.heightPx);
}

function paintArrows(timeline) {
  const { ctx, inks } = timeline;
  timeline.arrowEnds = [];
  for (const arrow of timeline.arrows) {
    const from = endOf(timeline, arrow, "from");
    const to = endOf(timeline, arrow, "to");
    if (!from || !to) continue;
    const bend = clamp(Math.abs(to.x - from.x) / 2, 24, 120);
    ctx.strokeStyle = inks.arrow;
    ctx.lineWidth = 1.5;
    ctx.setLineDash(arrow.how === "collective" ? [5, 3] : []);
    ctx.beginPath();
    ctx.moveTo(from.x, from.y);
    ctx.bezierCurveTo(from.x + bend, from.y, to.x - bend, to.y, to.x, to.y);
    ctx.stroke();
    ctx.setLineDash([]);
    for (const end of [from, to]) paintEnd(timeline, end);
  }
}

function paintEnd(timeline, end) {
  timeline.ctx.fillStyle = timeline.inks.arrow;
  timeline.ctx.beginPath();
  timeline.ctx.arc(end.x, end.y, ARROW_END_PX, 0, 2 * Math.PI);
  timeline.ctx.fill();
  timeline.arrowEnds.push(end);
}

function endOf(timeline, arrow, side) {
  const slice = arrow[side];
  const place = timeline.layout.placeOf(slice.track, slice.row, timeline.roles[slice.track]);
  return place && { x: timeline.xOf(arrow[`${side}_ns`]), y: timeline.yOf(place.y) + place.heightPx / 2, slice };
}

function paintLabel(timeline, line) {
  const { ctx, inks } = timeline;
  const y = timeline.yOf(line.y);
  if (!isVisible(timeline, y, line.heightPx) || line.type === "strip") return;
  const isRank = line.type === "rank";
  const middle = y + Math.min(line.heightPx, RANK_PX) / 2 - 0.5;
  const indentPx = { rank: 8, group: 18, units: 32, track: 32 }[line.type];
  ctx.font = isRank ? BOLD : FONT;
  ctx.fillStyle = line.type === "track" || line.type === "units" ? inks.faintText : inks.text;
  if (line.key) ctx.fillText(timeline.layout.folded.has(line.key) ? "▸" : "▾", indentPx - 2, middle);
  if (line.type === "track") paintRole(timeline, line, middle);
  if (line.type === "track") ctx.fillText(timeline.pinned.has(line.track.track) ? "●" : "○", GUTTER_PX - PIN_PX + 6, middle);
  const textX = indentPx + (line.key ? 12 : 8);
  const roomPx = GUTTER_PX - textX - (line.type === "track" ? PIN_PX : 4);
  ctx.fillText(shortened(line.label, Math.floor(roomPx / CHARACTER_PX)), textX, middle, roomPx);
  ctx.font = FONT;
}

function paintRole(timeline, line, middle) {
  const kind = timeline.kinds.find((kind) => kind.role === line.track.role);
  if (!kind) return;
  const ink = timeline.ctx.fillStyle;
  timeline.ctx.fillStyle = kind.colour;
  timeline.ctx.fillRect(24, middle - 4, 8, 8);
  timeline.ctx.fillStyle = ink;
}

/** The ruler and the findings, which stay in place while the tracks scroll. */
function paintHead(timeline) {
  const { ctx, widthPx, headPx, inks } = timeline;
  ctx.fillStyle = inks.headGround;
  ctx.fillRect(0, 0, widthPx, headPx);
  ctx.fillStyle = inks.text;
  const { marks, base } = timeline.ticks;
  ctx.fillText(base ? `from ${base}` : "", 8, RULER_PX / 2, GUTTER_PX - 12);
  for (const { atNs, label } of marks) {
    const x = Math.round(timeline.xOf(atNs));
    ctx.fillRect(x, RULER_PX - 6, 1, 6);
    // The last label ends at the edge instead of behind it.
    ctx.fillText(label, Math.min(x + 4, widthPx - ctx.measureText(label).width - 2), RULER_PX / 2 - 1);
  }
  ctx.fillStyle = inks.match;
  for (const start of timeline.matches?.start ?? []) {
    const x = timeline.xOf(start);
    if (x >= GUTTER_PX) ctx.fillRect(x - 1, RULER_PX - 5, 2, 5);
  }
  paintFindings(timeline);
  ctx.fillStyle = inks.edge;
  ctx.fillRect(0, headPx - 1, widthPx, 1);
  ctx.clearRect(GUTTER_PX - 1, 0, 1, RULER_PX);
}

function paintFindings(timeline) {
  const { ctx, inks } = timeline;
  if (!timeline.findings.length) return;
  ctx.fillStyle = inks.text;
  for (const [row, name] of timeline.findingRows.entries()) {
    ctx.fillText(shortened(name, 24), 20, RULER_PX + (row + 0.5) * FINDING_PX, GUTTER_PX - 24);
  }
  ctx.save();
  clipTo(ctx, GUTTER_PX, RULER_PX, timeline.widthPx, timeline.headPx);
  for (const mark of timeline.findings) {
    const left = timeline.xOf(mark.start);
    const right = Math.max(timeline.xOf(mark.end), left + (mark.colour ? 0.5 : 3));
    if (right < GUTTER_PX || left > timeline.widthPx) continue;
    const y = RULER_PX + mark.row * FINDING_PX;
    ctx.fillStyle = mark.colour ?? inks.evidence;
    ctx.globalAlpha = mark.colour || mark.key === timeline.finding ? 1 : 0.65;
    ctx.fillRect(left, y, right - left, FINDING_PX - 2);
    ctx.globalAlpha = 1;
  }
  ctx.restore();
}

function paintRange(timeline) {
  const { ctx, range, inks } = timeline;
  if (!range) return;
  const [left, right] = [timeline.xOf(range.from), timeline.xOf(range.to)].map((x) => clamp(x, GUTTER_PX, timeline.widthPx));
  ctx.fillStyle = inks.range;
  ctx.fillRect(left, 0, right - left, timeline.heightPx);
  ctx.fillStyle = inks.text;
  for (const x of [left, right]) ctx.fillRect(x, 0, 1, timeline.heightPx);
  const note = range.note ? ` · ${shortened(range.note, MAX_NOTE_CHARACTERS)}` : "";
  const text = durationText(range.to - range.from) + note;
  ctx.font = BOLD;
  const textPx = ctx.measureText(text).width + 12;
  const middle = clamp((left + right) / 2, GUTTER_PX + textPx / 2, timeline.widthPx - textPx / 2);
  ctx.fillRect(middle - textPx / 2, 3, textPx, 19);
  ctx.fillStyle = inks.ground;
  ctx.fillText(text, middle - textPx / 2 + 6, 13);
  ctx.font = FONT;
}
