// A tile: the slices of a part of the run, which the server merged for a number of pixels, as columns.

const TYPES = {
  track: Uint32Array,
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

/** A message of message.py: JSON, with the offset and length of each column behind the JSON. */
function unpacked(bytes) {
  const headLength = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headLength)));
  const body = bytes.subarray(4 + headLength);
  for (const part of [data.tile, data.matches]) if (part) part.columns = columnsOf(part.columns, body);
  return data;
}

/** Copied, because an array must begin at a multiple of its element size. */
function columnsOf(places, body) {
  const read = ([name, [at, length]]) => [name, new TYPES[name](body.slice(at, at + length).buffer)];
  return Object.fromEntries(Object.entries(places).map(read));
}

class Tile {
  constructor(packed) {
    Object.assign(this, packed.columns);
    this.tracks = new Set(packed.tracks);
    this.seq = packed.seq;
    this.from = packed.start;
    this.to = packed.end;
    this.names = packed.names;
    this.labels = packed.labels;
    this.bands = packed.bands;
    this.length = this.start.length;
    this.nsPerPx = (packed.end - packed.start) / packed.pixels;
    this.isExact = this.id.every((id) => id !== MERGED);
  }

  /** Whether the tile contains everything that a view shows. */
  covers(view, tracks) {
    return this.from <= view.from + 1 && this.to >= view.to - 1 && tracks.every((track) => this.tracks.has(track));
  }

  /** Whether the tile has the full resolution at this scale. */
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

  indexOf(slice) {
    for (let i = 0; i < this.length; i++) {
      if (this.id[i] === slice.id && this.track[i] === slice.track && this.row[i] === slice.row) return i;
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
