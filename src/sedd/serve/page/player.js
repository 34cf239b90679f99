// Time: which frame of each recording is shown. With two recordings, one slider moves both in proportion.

import { BINS, make } from "./pane.js";

const PLAY_SECONDS = 4;

export class Player {
  constructor(find, shownPanes) {
    this.panes = shownPanes;
    this.slider = find("#time");
    this.button = find("#play");
    this.readout = find("#readout");
    this.legend = find("#legend");
    this.inputs = [...document.querySelectorAll("input[name=colour]")];
    Object.assign(this, { position: 0, isLive: true, timer: null, scheduled: false });
    this.slider.addEventListener("input", () => this.seek(Number(this.slider.value)));
    this.button.addEventListener("click", () => this.toggle());
    find("#back").addEventListener("click", () => this.move(-1));
    find("#forward").addEventListener("click", () => this.move(1));
    for (const input of this.inputs) input.addEventListener("change", () => this.update());
    this.#showButton();
  }

  get colour() {
    return this.inputs.find((input) => input.checked).value;
  }

  set colour(name) {
    const input = this.inputs.find((one) => one.value === name);
    if (input) input.checked = true;
    this.update();
  }

  // The length of the slider, and how far it can go until more has arrived.
  get count() {
    return Math.max(0, ...this.panes().map((pane) => pane.recording.length));
  }

  get end() {
    const shares = this.panes().map(({ recording: { frames, length } }) => (length ? frames.length / length : 0));
    return Math.round(this.count * Math.max(0, ...shares));
  }

  // Show what arrives.
  follow() {
    this.pause();
    this.isLive = true;
    this.update();
  }

  seek(position) {
    this.pause();
    this.#setPosition(position);
  }

  move(by) {
    this.seek((this.isLive ? this.end : this.position) + by);
  }

  #setPosition(position) {
    this.position = Math.max(0, Math.min(this.end, position));
    this.isLive = this.position === this.end;
    this.update();
  }

  toggle() {
    if (this.timer) this.pause();
    else this.play();
  }

  play() {
    if (!this.count) return;
    if (this.isLive) this.#setPosition(0);
    const delay = Math.max(33, Math.min(400, (1000 * PLAY_SECONDS) / this.count));
    const stride = Math.max(1, Math.round((this.count * delay) / (1000 * PLAY_SECONDS)));
    this.timer = setInterval(() => {
      this.#setPosition(this.position + stride);
      if (this.isLive) this.pause();
    }, delay);
    this.#showButton();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.#showButton();
  }

  #showButton() {
    this.button.setAttribute("aria-label", this.timer ? "Pause" : "Play");
    this.button.classList.toggle("playing", this.timer !== null);
  }

  // Draw once per frame of the screen, however many events arrive.
  update() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.#draw();
    });
  }

  #draw() {
    const [panes, { count, colour }] = [this.panes(), this];
    if (!panes.length) return;
    if (this.isLive) this.position = this.end;
    const largest = Math.max(0, ...panes.flatMap((pane) => pane.recording.entropies()));
    const scale = Math.max(1, Math.ceil(2 * largest) / 2);
    for (const pane of panes) {
      const { length, frames } = pane.recording;
      const frame = Math.round((this.position / count) * length);
      pane.draw(this.isLive ? frames.length : Math.min(frame, frames.length), { colour, scale });
    }
    this.slider.max = Math.max(1, count);
    this.slider.value = this.position;
    this.#describe(panes[0]);
    this.#drawLegend(colour, scale);
  }

  #describe({ recording, frame }) {
    const step = recording.frames[frame - 1]?.step ?? 0;
    const filled = `${recording.filled(frame)}/${recording.slots.length} tokens`;
    const parts = [`step ${step}/${recording.lastStep}`, `t ${recording.timeAfter(frame).toFixed(2)}`, filled];
    this.readout.textContent = parts.join(" · ");
    this.slider.setAttribute("aria-valuetext", parts.join(", "));
  }

  #drawLegend(colour, scale) {
    const ends = { step: ["first step", "last step"], entropy: ["0 nats: sure", `${scale} nats: unsure`] }[colour];
    const key = `${colour} ${scale}`;
    if (this.legend.dataset.key === key) return;
    this.legend.dataset.key = key;
    document.body.dataset.colour = colour;
    this.legend.replaceChildren();
    if (!ends) return;
    const ramp = make("span", "ramp");
    for (let bin = 0; bin < BINS; bin += 1) ramp.append(make("i", "cell"));
    [...ramp.children].forEach((cell, bin) => (cell.dataset.bin = bin));
    this.legend.append(ends[0], ramp, ends[1]);
  }
}
