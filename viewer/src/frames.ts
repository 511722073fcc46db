// The pictures of an episode: fetched in blocks, decoded, a bounded number kept.

import { FRAMES_BLOCK, type Api, type EpisodeId } from "./api.ts";
import { h, set } from "./dom.ts";
import { isAbort } from "./view.ts";

const MOST_BYTES = 48 << 20; // of decoded pictures, 4 bytes a pixel
const AHEAD = 3; // blocks fetched in the direction of motion
const BEHIND = 1;

type Block = Map<number, ImageBitmap>;

export class FrameStore {
  private readonly blocks = new Map<number, Block>(); // the last used is the last
  private readonly asked = new Map<number, AbortController>();
  private bytes = 0;
  private at = 0;
  private direction = 1;
  private closed = false;

  /** `arrived` is called when more pictures are there, `early` with the one in sight before those around it, `failed` when a block cannot be had. */
  constructor(
    private readonly api: Api,
    private readonly id: EpisodeId,
    readonly column: string,
    private rows: number,
    private readonly arrived: () => void,
    private readonly early: (row: number, bitmap: ImageBitmap) => void,
    private readonly failed: (error: unknown) => void,
  ) {}

  /** The episode has grown: the last block may have more pictures now. */
  grow(rows: number): void {
    if (rows === this.rows) return;
    this.drop(Math.floor((this.rows - 1) / FRAMES_BLOCK));
    this.rows = rows;
  }

  /** Return the picture of a row if it is there, and fetch what is likely to be needed next. */
  get(row: number): ImageBitmap | null {
    if (row !== this.at) this.direction = row > this.at ? 1 : -1;
    this.at = row;
    const number = Math.floor(row / FRAMES_BLOCK);
    const block = this.blocks.get(number);
    if (block) {
      this.blocks.delete(number);
      this.blocks.set(number, block);
    }
    this.plan(number);
    return block?.get(row) ?? null;
  }

  /** Whether the block of a row is there; a picture that is missing in it cannot be read. */
  has(row: number): boolean {
    return this.blocks.has(Math.floor(row / FRAMES_BLOCK));
  }

  close(): void {
    this.closed = true;
    for (const controller of this.asked.values()) controller.abort();
    for (const number of [...this.blocks.keys()]) this.drop(number);
  }

  // The block in sight first and alone: what is ahead waits until it is there.
  private plan(number: number): void {
    const last = Math.floor((this.rows - 1) / FRAMES_BLOCK);
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
      const pictures = await this.api.frames(this.id, this.column, number, controller.signal);
      const decode = async (row: number): Promise<[number, ImageBitmap]> => [row, await createImageBitmap(pictures.get(row)!)];
      // The picture in sight first: the others follow while it is drawn.
      const sought = this.at;
      const decoded = pictures.has(sought) ? [await decode(sought)] : [];
      if (decoded[0] && this.at === sought && !controller.signal.aborted) this.early(...decoded[0]);
      decoded.push(...(await Promise.all([...pictures.keys()].filter((row) => row !== sought || !decoded.length).map(decode))));
      if (controller.signal.aborted || this.closed) {
        for (const [, bitmap] of decoded) bitmap.close();
        return;
      }
      this.blocks.set(number, new Map(decoded));
      for (const [, bitmap] of decoded) this.bytes += size(bitmap);
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
    this.arrived();
    this.plan(Math.floor(this.at / FRAMES_BLOCK));
  }

  private drop(number: number): void {
    for (const bitmap of this.blocks.get(number)?.values() ?? []) {
      this.bytes -= size(bitmap);
      bitmap.close();
    }
    this.blocks.delete(number);
  }
}

const size = (bitmap: ImageBitmap): number => bitmap.width * bitmap.height * 4;

/** A canvas that shows one picture of a store at a time. */
export class Picture {
  readonly element: HTMLElement;
  private readonly canvas = h("canvas", { role: "img" });
  private readonly context = this.canvas.getContext("2d", { alpha: true })!;
  private readonly caption = h("figcaption");

  constructor(private readonly label: string) {
    this.element = h("figure", { class: "picture" }, [this.canvas, this.caption]);
  }

  /** The height and width of the pictures, before the first is there. */
  shape(shape: [number, number] | null): void {
    if (shape && shape[0] && shape[1]) this.element.style.setProperty("--ratio", String(shape[1] / shape[0]));
  }

  title(text: string): void {
    this.caption.textContent = text;
  }

  /** Show that the picture of a row cannot be read. */
  lost(row: number): void {
    this.element.classList.remove("waiting");
    this.element.classList.add("lost");
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    set(this.canvas, { "data-step": row, "aria-label": `${this.label}, step ${row}: the picture cannot be read` });
  }

  /** Draw a picture; without one, the last stays and is marked as waiting. */
  show(row: number, bitmap: ImageBitmap | null): void {
    this.element.classList.toggle("waiting", bitmap === null);
    if (!bitmap) return;
    this.element.classList.remove("lost");
    if (this.canvas.width !== bitmap.width || this.canvas.height !== bitmap.height) {
      this.canvas.width = bitmap.width;
      this.canvas.height = bitmap.height;
      this.element.style.setProperty("--ratio", String(bitmap.width / bitmap.height));
      this.canvas.classList.toggle("enlarged", bitmap.width < this.canvas.clientWidth * devicePixelRatio);
    }
    this.context.clearRect(0, 0, bitmap.width, bitmap.height);
    this.context.drawImage(bitmap, 0, 0);
    set(this.canvas, { "data-step": row, "aria-label": `${this.label}, step ${row}` });
  }
}
