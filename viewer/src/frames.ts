// The pictures of an episode: fetched in blocks and kept as they came, a bounded number of them decoded.

import { FRAMES_BLOCK, type FrameBlock } from "./api.ts";
import { h, set } from "./dom.ts";
import { RAW } from "./grid.ts";
import { isAbort } from "./view.ts";

const MOST_BYTES = 8 << 20; // of pictures as they came
const MOST_DECODED = 6 << 20; // bytes of decoded pictures, 4 a pixel
const AHEAD = 3; // blocks fetched in the direction of motion
const BEHIND = 1;
const DECODED_AHEAD = 3; // pictures decoded in the direction of motion

/** Return the pictures of a block of rows. */
type Fetch = (block: number, signal: AbortSignal) => Promise<FrameBlock>;

interface Decoded {
  image: CanvasImageSource;
  width: number;
  height: number;
  close(): void;
}

export class FrameStore {
  private readonly blocks = new Map<number, FrameBlock>(); // the last used is the last
  private readonly asked = new Map<number, AbortController>();
  private readonly decoded = new Map<number, Decoded>(); // the last used is the last
  private readonly decoding = new Set<number>();
  private bytes = 0;
  private decodedBytes = 0;
  private at = 0;
  private direction = 1;
  private turn = 0; // counts the pictures that were sought
  private shown = 0; // the turn of the last that `arrived`
  private closed = false;
  private partial = false; // some pictures are still made

  /** `arrived` is called with each picture that was sought and not there at once, `missing` when one is known to be unreadable, `failed` when a block cannot be had. */
  constructor(
    private readonly ask: Fetch,
    readonly column: string,
    private rows: number,
    private readonly arrived: (row: number, bitmap: Decoded) => void,
    private readonly missing: () => void,
    private readonly failed: (error: unknown) => void,
  ) {}

  /** The episode has grown: the last block may have more pictures now. */
  grow(rows: number): void {
    if (rows === this.rows) return;
    const last = Math.floor((this.rows - 1) / FRAMES_BLOCK);
    this.asked.get(last)?.abort();
    this.asked.delete(last);
    this.drop(last);
    this.rows = rows;
  }

  /** More pictures may be there now; `partial` says that some will follow later. */
  refresh(partial: boolean): void {
    if (!partial && !this.partial) return;
    this.partial = partial;
    for (const [number, { pictures }] of [...this.blocks]) {
      if (pictures.size < Math.min(FRAMES_BLOCK, this.rows - number * FRAMES_BLOCK)) this.drop(number);
    }
    this.plan();
  }

  /** Return the picture of a row if it is decoded, and fetch and decode what is likely to be needed next. */
  get(row: number): Decoded | null {
    if (row !== this.at) this.direction = row > this.at ? 1 : -1;
    this.at = row;
    this.turn++;
    touch(this.blocks, numberOf(row));
    const bitmap = touch(this.decoded, row);
    if (!bitmap) void this.decode(row);
    else this.decodeAhead();
    this.plan();
    return bitmap ?? null;
  }

  /** Whether the picture of a row cannot be read: its block is there without it. */
  isLost(row: number): boolean {
    return !this.partial && this.blocks.get(numberOf(row))?.pictures.has(row) === false;
  }

  close(): void {
    this.closed = true;
    for (const controller of this.asked.values()) controller.abort();
    for (const bitmap of this.decoded.values()) bitmap.close();
    this.decoded.clear();
    for (const number of [...this.blocks.keys()]) this.drop(number);
  }

  // The block in sight first and alone: what is ahead waits until it is there.
  private plan(): void {
    const number = numberOf(this.at);
    const last = numberOf(this.rows - 1);
    const wanted = [number];
    for (let i = 1; i <= AHEAD; i++) wanted.push(number + i * this.direction);
    for (let i = 1; i <= BEHIND; i++) wanted.push(number - i * this.direction);
    for (const [asked, controller] of this.asked) {
      if (wanted.includes(asked)) continue;
      controller.abort();
      this.asked.delete(asked);
    }
    if (!this.blocks.has(number)) {
      void this.fetch(number);
      return;
    }
    const missing = wanted.find((block) => block >= 0 && block <= last && !this.blocks.has(block));
    if (missing !== undefined && this.asked.size === 0) void this.fetch(missing);
  }

  private async fetch(number: number): Promise<void> {
    if (this.asked.has(number)) return;
    const controller = new AbortController();
    this.asked.set(number, controller);
    try {
      const block = await this.ask(number, controller.signal);
      if (controller.signal.aborted || this.closed) {
        block.free();
        return;
      }
      this.blocks.set(number, block);
      this.bytes += sizeOf(block);
      for (const old of [...this.blocks.keys()]) {
        if (this.bytes <= MOST_BYTES || this.blocks.size <= AHEAD + BEHIND + 1) break;
        this.drop(old);
      }
    } catch (error) {
      if (!isAbort(error) && !this.closed) this.failed(error);
      return;
    } finally {
      if (this.asked.get(number) === controller) this.asked.delete(number);
    }
    if (number === numberOf(this.at)) {
      if (this.isLost(this.at)) this.missing();
      else void this.decode(this.at);
    }
    this.plan();
  }

  private drop(number: number): void {
    const block = this.blocks.get(number);
    if (!block) return;
    this.bytes -= sizeOf(block);
    this.blocks.delete(number);
    block.free();
  }

  private async decode(row: number): Promise<void> {
    const block = this.blocks.get(numberOf(row));
    const bytes = block?.pictures.get(row);
    if (!block || !bytes || this.decoded.has(row) || this.decoding.has(row)) return;
    const turn = row === this.at ? this.turn : 0;
    this.decoding.add(row);
    try {
      const bitmap = await decoded(bytes, block);
      if (this.closed) {
        bitmap.close();
        return;
      }
      this.decoded.set(row, bitmap);
      this.decodedBytes += areaOf(bitmap);
      for (const [row, old] of this.decoded) {
        if (this.decodedBytes <= MOST_DECODED || this.decoded.size <= DECODED_AHEAD + 1) break;
        this.decodedBytes -= areaOf(old);
        old.close();
        this.decoded.delete(row);
      }
      // While the reader scrubs faster than pictures are decoded, the last one that is there is shown.
      if (row === this.at || turn > this.shown) {
        this.shown = row === this.at ? this.turn : turn;
        this.arrived(row, bitmap);
      }
    } catch (error) {
      if (!this.closed) this.failed(error);
      return;
    } finally {
      this.decoding.delete(row);
    }
    this.decodeAhead();
  }

  // One at a time, and none beside the one in sight.
  private decodeAhead(): void {
    for (let i = 0; i <= DECODED_AHEAD && this.decoding.size === 0; i++) void this.decode(this.at + i * this.direction);
  }
}

const numberOf = (row: number): number => Math.floor(row / FRAMES_BLOCK);
const areaOf = (bitmap: Decoded): number => bitmap.width * bitmap.height * 4;
const sizeOf = (block: FrameBlock): number => [...block.pictures.values()].reduce((sum, bytes) => sum + bytes.byteLength, 0);

/** Decode a picture. Where there is an ImageDecoder, in secure contexts, no Blob waits for the garbage collector. */
export async function decoded(bytes: Uint8Array<ArrayBuffer>, { type, size }: FrameBlock): Promise<Decoded> {
  if (type === RAW) {
    const image = await createImageBitmap(new ImageData(new Uint8ClampedArray(bytes.buffer), size![1]));
    return { image, width: image.width, height: image.height, close: () => image.close() };
  }
  if (!("ImageDecoder" in globalThis)) {
    const image = await createImageBitmap(new Blob([bytes], { type }));
    return { image, width: image.width, height: image.height, close: () => image.close() };
  }
  const decoder = new ImageDecoder({ data: bytes, type });
  try {
    const { image } = await decoder.decode();
    return { image, width: image.displayWidth, height: image.displayHeight, close: () => image.close() };
  } finally {
    decoder.close();
  }
}

/** Return a value and make it the last of its map. */
function touch<T>(map: Map<number, T>, key: number): T | undefined {
  const value = map.get(key);
  if (value !== undefined) {
    map.delete(key);
    map.set(key, value);
  }
  return value;
}

/** A canvas that shows one picture of a store at a time. */
export class Picture {
  readonly element: HTMLElement;
  private readonly canvas = h("canvas", { role: "img" });
  private readonly context = this.canvas.getContext("2d", { alpha: true })!;
  private readonly caption = h("figcaption");
  private name = "";
  private values = "";

  constructor(private readonly label: string) {
    this.element = h("figure", { class: "picture" }, [this.canvas, this.caption]);
    new ResizeObserver(() => this.enlarge()).observe(this.canvas);
  }

  /** Pixels of a picture that is shown larger than it is stay sharp. */
  private enlarge(): void {
    this.canvas.classList.toggle("enlarged", this.canvas.width < this.canvas.clientWidth * devicePixelRatio);
  }

  /** The height and width of the pictures, before the first is there. */
  shape(shape: [number, number] | null): void {
    if (shape && shape[0] && shape[1]) this.element.style.setProperty("--ratio", String(shape[1] / shape[0]));
  }

  title(text: string): void {
    this.name = text;
    this.captioned();
  }

  /** The smallest and the largest value that colours stand for. */
  range(text: string): void {
    this.values = text;
    this.captioned();
  }

  private captioned(): void {
    this.caption.textContent = [this.name, this.values].filter(Boolean).join(" · ");
  }

  /** Show that the picture of a row cannot be read. */
  lost(row: number): void {
    this.element.classList.remove("waiting");
    this.element.classList.add("lost");
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    set(this.canvas, { "data-step": row, "aria-label": `${this.label}, step ${row}: the picture cannot be read` });
  }

  /** Draw a picture; without one, the last stays and is marked as waiting. */
  show(row: number, bitmap: Decoded | null): void {
    this.element.classList.toggle("waiting", bitmap === null);
    if (!bitmap) return;
    this.element.classList.remove("lost");
    if (this.canvas.width !== bitmap.width || this.canvas.height !== bitmap.height) {
      this.canvas.width = bitmap.width;
      this.canvas.height = bitmap.height;
      this.element.style.setProperty("--ratio", String(bitmap.width / bitmap.height));
      this.enlarge();
    }
    this.context.clearRect(0, 0, bitmap.width, bitmap.height);
    this.context.drawImage(bitmap.image, 0, 0);
    set(this.canvas, { "data-step": row, "aria-label": `${this.label}, step ${row}` });
  }
}
