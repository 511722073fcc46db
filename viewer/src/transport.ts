// The bar that plays an episode: buttons, scrubber, speed.

import type { Mark } from "./api.ts";
import { fill, h, icon, set } from "./dom.ts";
import { count } from "./words.ts";

export const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 64, 256];

export interface TransportEvents {
  toggle(): void;
  seek(row: number): void;
  by(steps: number): void;
  speed(value: number): void;
}

export class Transport {
  readonly element: HTMLElement;
  private readonly playButton: HTMLButtonElement;
  private readonly slider = h("input", { type: "range", min: 0, max: 1, step: 1, value: 0, "aria-label": "Step", class: "scrubber" });
  private readonly track = h("div", { class: "track" });
  private readonly label = h("output", { class: "where", "aria-live": "off" });
  private readonly speeds = h("select", { "aria-label": "Speed", class: "speed" }, SPEEDS.map((speed) => h("option", { value: speed, selected: speed === 1 }, [`${speed}×`])));
  private length = 0;

  constructor(private readonly events: TransportEvents) {
    const button = (name: Parameters<typeof icon>[0], label: string, click: () => void): HTMLButtonElement =>
      h("button", { type: "button", class: "icon-button", "aria-label": label, title: label }, [icon(name)], { click });
    this.playButton = button("play", "Play (space)", () => this.events.toggle());
    this.playButton.classList.add("play");
    this.element = h("section", { class: "transport", "aria-label": "Playback" }, [
      button("back", "Step back (left arrow)", () => this.events.by(-1)),
      this.playButton,
      button("forward", "Step forward (right arrow)", () => this.events.by(1)),
      h("div", { class: "slider" }, [this.track, this.slider]),
      this.label,
      this.speeds,
    ]);
    this.slider.addEventListener("input", () => this.events.seek(Number(this.slider.value)));
    this.speeds.addEventListener("change", () => this.events.speed(Number(this.speeds.value)));
  }

  /** marks: findings of this episode. */
  show(length: number, difference: number | null, marks: Mark[] = []): void {
    this.length = length;
    set(this.slider, { max: length });
    const tick = (row: number, kind: string, title: string): HTMLElement => {
      const element = h("span", { class: kind, title });
      element.style.left = `${length ? (row / length) * 100 : 0}%`;
      return element;
    };
    fill(this.track, [
      ...marks.map(({ position, severity, text }) => tick(position ?? 0, `tick ${severity}`, text)),
      difference !== null && tick(difference, "difference", `First difference: step ${difference}`),
    ]);
  }

  setPosition(row: number): void {
    if (Number(this.slider.value) !== row) this.slider.value = String(row);
    set(this.slider, { "aria-valuetext": `step ${row} of ${this.length}` });
    this.slider.style.setProperty("--part", `${this.length ? (row / this.length) * 100 : 0}%`);
    fill(this.label, [h("b", {}, [count(row)]), h("span", {}, [` / ${count(this.length)}`])]);
  }

  setPlaying(playing: boolean): void {
    fill(this.playButton, [icon(playing ? "pause" : "play")]);
    set(this.playButton, { "aria-label": playing ? "Pause (space)" : "Play (space)", title: playing ? "Pause (space)" : "Play (space)" });
  }

  setSpeed(speed: number): void {
    this.speeds.value = String(speed);
  }
}
