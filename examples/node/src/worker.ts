/** An env worker for `dart coordinator`: the world of colours.ts behind the session of session.ts.
 *  npm run worker -- --coordinator HOST:PORT [--id NAME] [--tls-ca FILE] */
import { createHash } from "node:crypto";
import { ColourPage } from "./colours.js";
import { log, options } from "./connect.js";
import type { Image } from "./generated/dart/v1/image.js";
import { type Answer, type Command, Refused, Session, type World } from "./session.js";

class Colours implements World {
  private viewport: [number, number] = [0, 0];
  private readonly pages = new Map<string, ColourPage>();

  /** The config is `environment` of the run's YAML file, completed with every default. */
  begin(config: { environment: { viewport: [number, number]; slots: number } }): number {
    this.pages.clear();
    this.viewport = config.environment.viewport;
    return config.environment.slots;
  }

  async carryOut(command: Command, work: string): Promise<Answer> {
    const began = performance.now();
    switch (command.$case) {
      case "reset": {
        const page = new ColourPage(command.value.task!.seed, ...this.viewport);
        this.pages.set(work, page);
        return observed(page, began, page.instruction);
      }
      case "act": {
        const page = this.pages.get(work);
        if (page === undefined) throw new Error("no episode of this name was begun");
        const action = command.value.action?.kind;
        if (action?.$case === "click" && action.value.at) {
          const { x, y } = action.value.at; // fractions of the screenshot's width and height
          page.click(x * page.width, y * page.height);
        }
        if (command.value.last) page.done = true; // finished, at the step limit, or its text was no action
        return observed(page, began, "");
      }
      case "release":
        if (this.pages.get(work)?.done === false) log(`${work} was given up before its end; \`dart status\` says why`);
        this.pages.delete(work);
        return { $case: "released", value: {} };
      default:
        throw new Error(`this worker does not know ${command.$case}`);
    }
  }
}

/** A screenshot is known by the SHA-256 of its bytes, so that it travels to each replica only once. With `: Image`, the
 *  compiler refuses a field that is missing or that `Image` does not have; protobuf itself would drop it silently. */
function observed(page: ColourPage, began: number, instruction: string): Answer {
  const data = page.png();
  const sha256 = createHash("sha256").update(data).digest();
  const image: Image = { sha256, mediaType: "image/png", widthPixels: page.width, heightPixels: page.height, data };
  const evidenceJson = page.done ? JSON.stringify({ clicked: page.clicked }) : "";
  const seconds = (performance.now() - began) / 1000;
  return { $case: "observed", value: { image, instruction, done: page.done, reward: page.reward, seconds, evidenceJson } };
}

const session = new Session(options.coordinator, options.id, new Colours());
for (const signal of ["SIGINT", "SIGTERM"] as const) process.once(signal, () => session.stop());
try {
  log(`ended: ${await session.run()}`);
} catch (error) {
  if (!(error instanceof Refused)) throw error;
  log(`error: ${error.message}`);
  process.exitCode = 2;
}
