// A tile: the slices of a part of the run as the server drew them for a number of pixels, column by column.

const TYPES = {
  track: Uint16Array,
  row: Uint16Array,
  start: Float64Array,
  dur: Float64Array,
  name: Uint32Array,
  id: Int32Array,
  kind: Uint8Array,
  count: Uint32Array,
  fill: Uint8Array,
};
const MERGED = -1;

/** Base64 to a typed array. The bytes are little-endian, as every browser's arrays are. */
function decoded(text, type) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return new type(bytes.buffer);
}

function columnsOf(packed) {
  return Object.fromEntries(Object.entries(packed).map(([name, text]) => [name, decoded(text, TYPES[name])]));
}

class Tile {
  constructor(packed) {
    Object.assign(this, columnsOf(packed.columns));
    this.seq = packed.seq;
    this.from = packed.start;
    this.to = packed.end;
    this.names = packed.names;
    this.bands = packed.bands;
    this.length = this.start.length;
    this.nsPerPx = (packed.end - packed.start) / packed.pixels;
    this.isExact = this.id.every((id) => id !== MERGED);
  }

  /** Whether a view shows nothing that the tile lacks. */
  covers(view) {
    return this.from <= view.from + 1 && this.to >= view.to - 1;
  }

  /** Whether a view at this scale could be drawn no sharper. */
  isSharp(nsPerPx) {
    return this.isExact || this.nsPerPx <= nsPerPx * 1.1;
  }

  slice(i) {
    const { track, row, id, start, dur, kind, count, fill } = this;
    return {
      track: track[i],
      row: row[i],
      id: id[i],
      start: start[i],
      dur: dur[i],
      kind: kind[i],
      count: count[i],
      fill: fill[i],
      name: this.names[this.name[i]],
    };
  }

  indexOf(wanted) {
    for (let i = 0; i < this.length; i++) {
      if (this.id[i] === wanted.id && this.track[i] === wanted.track && this.row[i] === wanted.row) return i;
    }
    return -1;
  }

  /** The slice before (-1) or after (1) a moment in one row of a track; null at the end of the tile. */
  neighbour(track, row, atNs, direction) {
    let best = -1;
    for (let i = 0; i < this.length; i++) {
      if (this.track[i] !== track || this.row[i] !== row || this.id[i] === MERGED) continue;
      if ((this.start[i] - atNs) * direction <= 0) continue;
      if (best < 0 || (this.start[i] - this.start[best]) * direction < 0) best = i;
    }
    return best < 0 ? null : this.slice(best);
  }
}
