/** The world: a page with four coloured boxes, one of which the instruction names. A click on it is a success, a click
 *  on another box a failure, and a click beside the boxes changes nothing. It looks like MiniWoB's click-color, so that
 *  the policy that ships with dart can play it. This file knows nothing of dart. */
import { createCanvas } from "@napi-rs/canvas";

const COLOURS = ["red", "blue", "olive", "lime", "black", "grey", "purple", "orange", "yellow", "cyan", "pink", "magenta"];
const SIDE = 52;

type Box = { colour: string; left: number; top: number };

export class ColourPage {
  readonly instruction: string;
  done = false;
  reward = 0;
  clicked = "";
  private readonly wanted: string;
  private readonly boxes: Box[];

  /** The same seed always gives the same page: dart compares attempts at the same task. */
  constructor(seed: bigint, readonly width: number, readonly height: number) {
    const random = randomNumbers(seed);
    const colours = COLOURS.map((colour) => ({ colour, order: random() })).sort((one, other) => one.order - other.order);
    this.boxes = colours.slice(0, 4).map(({ colour }, place) => ({
      colour,
      left: width / 2 + (place % 2 ? 6 : -6 - SIDE),
      top: 75 + (place < 2 ? 0 : SIDE + 12),
    }));
    this.wanted = this.boxes[Math.floor(random() * 4)]!.colour;
    this.instruction = `Click on the ${this.wanted} colored box.`;
  }

  /** `x` and `y` are pixels. */
  click(x: number, y: number): void {
    const hit = this.boxes.find(({ left, top }) => x >= left && x < left + SIDE && y >= top && y < top + SIDE);
    if (hit === undefined || this.done) return;
    this.clicked = hit.colour;
    this.done = true;
    this.reward = hit.colour === this.wanted ? 1 : 0;
  }

  png(): Buffer {
    const canvas = createCanvas(this.width, this.height);
    const context = canvas.getContext("2d");
    context.fillStyle = "white";
    context.fillRect(0, 0, this.width, this.height);
    context.fillStyle = "yellow";
    context.fillRect(0, 0, this.width, 50);
    for (const { colour, left, top } of this.boxes) {
      context.fillStyle = "black";
      context.fillRect(left, top, SIDE, SIDE);
      context.fillStyle = colour;
      context.fillRect(left + 1, top + 1, SIDE - 2, SIDE - 2);
    }
    return canvas.toBuffer("image/png");
  }
}

/** Numbers from 0 to 1 that the seed decides (mulberry32). */
function randomNumbers(seed: bigint): () => number {
  let state = Number(BigInt.asUintN(32, seed));
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
