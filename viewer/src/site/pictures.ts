// Observations that are images, as gym_trace/data/showing/pictures.py finds them, as BMP: it needs no compression.

import { type Bytes } from "../reader/index.ts";

/** What of a value is its image: height, width and channels, and the distance of their bytes, from `begin` on. */
export interface Image {
  height: number;
  width: number;
  channels: 1 | 3;
  begin: number;
  strides: [row: number, column: number, channel: number];
}

/** The image in a value of uint8 of this shape, or the last one of a stack; null if it is none. */
export function imageIn(dtype: string, shape: number[]): Image | null {
  if (dtype !== "|u1" || shape.length < 2 || shape.length > 4 || Math.min(...shape.slice(-3)) === 0 || shape[0] === 0) return null;
  let begin = 0;
  let dims = shape;
  if (dims.length === 4) {
    dims = dims.slice(1);
    begin = (shape[0]! - 1) * dims[0]! * dims[1]! * dims[2]!;
  }
  const [a, b, c] = dims as [number, number, number | undefined];
  if (c === undefined) return { height: a, width: b, channels: 1, begin, strides: [b, 1, 0] };
  if (a === 3 && 3 < Math.min(b, c)) return { height: b, width: c, channels: 3, begin, strides: [c, 1, b * c] };
  if (c === 1 || c === 3) return { height: a, width: b, channels: c, begin, strides: [b * c, c, 1] };
  if (c === 4 && 4 < a) return { height: a, width: b, channels: 1, begin: begin + 3, strides: [b * c, c, 0] };
  return { height: b, width: c, channels: 1, begin: begin + (a - 1) * b * c, strides: [c, 1, 0] };
}

/** A BMP of an image, its rows from the bottom up: 8 bits a pixel with a palette of grays, or 24 bits. */
export function bmp(bytes: Bytes, { height, width, channels, begin, strides }: Image): Bytes {
  const line = Math.ceil((width * channels) / 4) * 4;
  const palette = channels === 1 ? 1024 : 0;
  const start = 54 + palette;
  const file = new Uint8Array(start + line * height);
  const view = new DataView(file.buffer);
  view.setUint16(0, 0x424d);
  view.setUint32(2, file.length, true);
  view.setUint32(10, start, true);
  view.setUint32(14, 40, true);
  view.setInt32(18, width, true);
  view.setInt32(22, height, true);
  view.setUint16(26, 1, true);
  view.setUint16(28, 8 * channels, true);
  for (let i = 0; i < palette / 4; i++) view.setUint32(54 + 4 * i, i * 0x010101, true);
  const [down, along, deep] = strides;
  for (let y = 0; y < height; y++) {
    let to = start + (height - 1 - y) * line;
    let from = begin + y * down;
    for (let x = 0; x < width; x++, from += along) {
      if (channels === 3) file[to++] = bytes[from + 2 * deep]!, (file[to++] = bytes[from + deep]!);
      file[to++] = bytes[from]!;
    }
  }
  return file;
}
