/** An env worker's end of the session with the coordinator: everything but the world itself. docs/clients.md has the
 *  protocol in steps; the numbers in the comments are those steps. */
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { type ClientDuplexStream, type ServiceError, status } from "@grpc/grpc-js";
import { channelCredentials, channelOptions, log, metadata } from "./connect.js";
import {
  type Assignment, CoordinatorServiceClient, type DeepPartial, FailureCode, Role, SessionRequest, type SessionResponse,
  type Welcome,
} from "./generated/dart/v1/session.js";

type Sent = NonNullable<DeepPartial<SessionRequest>["body"]>;
type Received = NonNullable<SessionResponse["body"]>;
export type Command = Extract<Received, { value: { assignment: unknown } }>;
export type Answer = Extract<Sent, { $case: "observed" | "released" | "failure" }>;

type Ended = { why: string; bye?: string; retryAfterSeconds?: number };

export interface World {
  /** A new session begins with the run's config: whatever an earlier session held is void. Returns the slots. */
  begin(config: unknown): number;
  /** Carry the command out. What it throws becomes a Failure, and costs one attempt. */
  carryOut(command: Command, work: string): Promise<Answer>;
}

/** The coordinator refuses this worker, or was not reached: trying again would not help. */
export class Refused extends Error {}

const GIVE_UP_SECONDS = 60;
const SILENT_HEARTBEATS = 5;

export class Session {
  private readonly instanceId = randomUUID();
  private epoch = 0n;
  private heard = Date.now();
  private stream?: ClientDuplexStream<SessionRequest, SessionResponse>;
  private slots = 0;
  private readonly stopping = new AbortController();
  /** By piece of work: the newest command that was seen, and its answer once there is one. */
  private readonly seen = new Map<string, { sequence: number; answer?: Answer }>();

  constructor(
    private readonly address: string,
    private readonly workerId: string,
    private readonly world: World,
  ) {}

  /** Work until either end says Bye; returns its reason. A lost stream is dialled again (step 6). */
  async run(): Promise<string> {
    let delay = 0.2;
    while (!this.stopping.signal.aborted) {
      const dialled = Date.now();
      const ended = await this.converse();
      if (ended.bye !== undefined) return ended.bye;
      if (this.stopping.signal.aborted) break;
      if (this.heard >= dialled) delay = 0.2;
      const lost = (Date.now() - this.heard) / 1000;
      if (lost > GIVE_UP_SECONDS) throw new Refused(`${this.address} was not reached for ${lost.toFixed(0)} s: ${ended.why}`);
      const wait = ended.retryAfterSeconds ?? delay;
      log(`${ended.why}; dialling ${this.address} again in ${wait.toFixed(1)} s`);
      await sleep(wait * 1000, undefined, { signal: this.stopping.signal }).catch(() => undefined);
      if (ended.retryAfterSeconds) this.heard = Date.now();
      delay = Math.min(delay * 1.6, 3);
    }
    return "stopped";
  }

  stop(): void {
    this.stopping.abort();
    this.send({ $case: "bye", value: { reason: "stopped" } });
    this.stream?.end();
  }

  /** One stream, from Hello (step 2) to its end. */
  private converse(): Promise<Ended> {
    const client = new CoordinatorServiceClient(this.address, channelCredentials, channelOptions);
    const stream = (this.stream = client.session(metadata()));
    let pulse: NodeJS.Timeout | undefined;
    const conversation = new Promise<Ended>((resolve, reject) => {
      stream.on("data", (message: SessionResponse) => {
        this.heard = Date.now();
        const body = message.body;
        if (body?.$case === "reject") {
          const { reason, remedy, retryAfterSeconds } = body.value;
          if (retryAfterSeconds > 0) resolve({ why: `refused: ${reason}`, retryAfterSeconds });
          else reject(new Refused(`${reason}: ${remedy}`));
        } else if (body?.$case === "bye") {
          this.send({ $case: "bye", value: {} });
          if (body.value.refused) reject(new Refused(body.value.reason));
          else resolve({ why: "", bye: body.value.reason });
        } else if (body?.$case === "notice") {
          log(`the coordinator says that this worker broke a rule: ${body.value.reason}`);
        } else if (body?.$case === "welcome") {
          this.welcomed(body.value);
          pulse = this.beat(body.value.heartbeatSeconds);
        } else if (body && "assignment" in body.value && body.value.assignment) {
          void this.receive(body as Command, body.value.assignment);
        }
      });
      stream.on("end", () => resolve({ why: "the stream ended" }));
      stream.on("error", (error: ServiceError) => {
        if (error.code === status.UNAUTHENTICATED) reject(new Refused(`${error.details}: set DART_TOKEN to the token for env workers`));
        else resolve({ why: `the stream broke (${error.details || error.message})` });
      });
    });
    this.send({
      $case: "hello",
      value: {
        protocolVersion: 1, role: Role.ROLE_ENV, workerId: this.workerId, instanceId: this.instanceId, lastEpoch: this.epoch,
        capabilities: ["notices"],
      },
    });
    return conversation.finally(() => {
      clearInterval(pulse);
      stream.cancel();
      client.close();
    });
  }

  /** Steps 3 and 4: the coordinator's Welcome is answered with Ready. */
  private welcomed(welcome: Welcome): void {
    if (!welcome.resumed) {
      this.seen.clear();
      this.slots = this.world.begin(JSON.parse(welcome.configJson));
    }
    this.epoch = welcome.epoch;
    log(`${welcome.resumed ? "resumed" : "joined"} run ${welcome.runId} with ${this.slots} environments`);
    this.send({ $case: "ready", value: { slots: this.slots } });
  }

  /** Say that this worker is alive, and give the stream up when nothing has come for too long. */
  private beat(seconds: number): NodeJS.Timeout {
    return setInterval(() => {
      this.send({ $case: "heartbeat", value: { sentUnixSeconds: Date.now() / 1000 } });
      if (Date.now() - this.heard > SILENT_HEARTBEATS * seconds * 1000) this.stream?.cancel();
    }, seconds * 1000);
  }

  /** Step 5: every command is carried out once, however often it arrives, and answered with its assignment. */
  private async receive(command: Command, assignment: Assignment): Promise<void> {
    const { assignmentId, attempt, epoch, sequence } = assignment;
    if (epoch !== this.epoch || command.$case === "abort") return;
    const work = `${assignmentId}/${attempt}`;
    const known = this.seen.get(work);
    if (known && sequence <= known.sequence) {
      if (sequence === known.sequence && known.answer) this.send(known.answer);
      return;
    }
    const entry: { sequence: number; answer?: Answer } = { sequence };
    this.seen.delete(work);
    this.seen.set(work, entry);
    const [oldest] = this.seen.keys();
    if (this.seen.size > 64 + 2 * this.slots && oldest) this.seen.delete(oldest);
    try {
      entry.answer = await this.world.carryOut(command, work);
    } catch (error) {
      log(`${command.$case} of ${work} failed: ${error}`);
      entry.answer = { $case: "failure", value: { code: FailureCode.FAILURE_CODE_ENVIRONMENT, message: `${error}` } };
    }
    entry.answer.value!.assignment = assignment;
    if (epoch === this.epoch) this.send(entry.answer);
  }

  private send(body: Sent): void {
    if (this.stream?.writable) this.stream.write(SessionRequest.fromPartial({ body }));
  }
}
