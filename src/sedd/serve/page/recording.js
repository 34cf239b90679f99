// Everything one run has sent, so that any moment of it can be shown again.

export class Recording {
  constructor(parts, settings) {
    Object.assign(this, { parts, settings, frames: [], done: 0, total: 0, seed: null });
    Object.assign(this, { text: null, failed: null, isStopped: false });
    this.slots = []; // positions of the gaps, in the order of the text
    this.history = new Map(); // position → [{frame, edit}], in order
    this.started = performance.now();
    this.seconds = 0;
  }

  apply(event, data) {
    this.seconds = (performance.now() - this.started) / 1000;
    if (event === "start") {
      this.slots = data.tokens.flatMap((token, position) => (token.given ? [] : [position]));
      this.slots.forEach((position) => this.history.set(position, []));
      this.total = data.nfe_total;
      this.seed = data.seed;
    } else if (event === "step") {
      // step 0 is the start: noise, where it is not masks
      if (data.step > 0) this.frames.push({ step: data.step, t: data.t, edits: data.edits.length });
      [this.done, this.total] = [data.nfe_done, data.nfe_total];
      for (const edit of data.edits) {
        this.history.get(edit.position)?.push({ frame: this.frames.length, edit, step: data.step, t: data.t });
      }
    } else if (event === "end") {
      this.text = data.infilled;
      this.done = this.total;
      this.calls = data.usage.network_calls;
    } else if (event === "error") {
      this.failed = data.message;
    }
  }

  get isDone() {
    return this.text !== null;
  }

  // The number of frames that the time line has room for.
  get length() {
    return this.isDone || this.isStopped ? this.frames.length : Math.max(this.frames.length, this.total);
  }

  // What stands at a position after a frame: its last edit, or null for a mask.
  at(position, frame) {
    const entry = this.history.get(position)?.findLast((one) => one.frame <= frame);
    return entry && entry.edit.text !== null ? entry : null;
  }

  // The number of the last step of the time grid. Steps at which nothing can happen are not among the frames.
  get lastStep() {
    return Math.max(Number(this.settings.steps) || this.length, this.frames.at(-1)?.step ?? 0);
  }

  // The time that a frame leaves the text at: that at which the next step starts.
  timeAfter(frame) {
    return this.frames[frame]?.t ?? (this.isDone ? 0 : (this.frames.at(-1)?.t ?? 1));
  }

  // At how many positions the ends of two recordings have the same token.
  agreement(other) {
    const last = (one, position) => one.at(position, one.frames.length)?.edit.id;
    return this.slots.filter((position) => last(this, position) === last(other, position)).length;
  }

  filled(frame) {
    return this.slots.filter((position) => this.at(position, frame)).length;
  }

  // Entropies of what stands at the end.
  entropies() {
    const last = this.slots.map((position) => this.at(position, this.frames.length)?.edit.entropy);
    return last.filter((entropy) => typeof entropy === "number");
  }
}
