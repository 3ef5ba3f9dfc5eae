/** A client of ControlService: npm run control -- COMMAND --coordinator HOST:PORT */
import { type ServiceError } from "@grpc/grpc-js";
import { channelCredentials, channelOptions, metadata, options, positionals } from "./connect.js";
import {
  ControlServiceClient, GetStatusRequest, type GetStatusResponse, ListTrajectoriesRequest,
  type ListTrajectoriesResponse, WatchEventsRequest,
} from "./generated/dart/v1/control.js";

const client = new ControlServiceClient(options.coordinator, channelCredentials, channelOptions);

/** A call as a promise. */
function call<T>(begin: (done: (error: ServiceError | null, answer: T) => void) => void): Promise<T> {
  return new Promise((resolve, reject) => begin((error, answer) => (error ? reject(error) : resolve(answer))));
}

const commands: Record<string, () => Promise<void>> = {
  /** What the run is doing, and what each worker is doing. */
  async status() {
    const told = await call<GetStatusResponse>((done) => client.getStatus(GetStatusRequest.create(), metadata(), done));
    const rate = told.figures?.successRate;
    const success = rate === undefined ? "" : `, success ${(100 * rate).toFixed(0)} %`;
    console.log(`${told.runId}: ${told.phase}, update ${told.update}, ${told.trajectories} trajectories${success}`);
    for (const stall of told.stalls) console.log(`stalled: ${stall.waits} waits for ${stall.waitsFor}: ${stall.failure}`);
    for (const worker of told.workers) console.log(`  ${worker.workerId} ${worker.state}: ${worker.doing}`);
  },

  /** Stored events, then live ones, until the run ends. `watch 120` begins at sequence number 120. */
  async watch() {
    const fromSequence = BigInt(positionals[1] ?? 0);
    const events = client.watchEvents(WatchEventsRequest.create({ fromSequence }), metadata());
    for await (const event of events) console.log(`${event.sequence} ${event.kind} ${event.json}`);
  },

  /** Every trajectory, newest first, a page at a time. */
  async trajectories() {
    for (let pageToken = "", more = true; more; more = pageToken !== "") {
      const request = ListTrajectoriesRequest.create({ pageSize: 100, pageToken });
      const page = await call<ListTrajectoriesResponse>((done) => client.listTrajectories(request, metadata(), done));
      for (const one of page.trajectories) console.log(`${one.id} ${one.taskId} reward ${one.reward} ${one.fate}`);
      pageToken = page.nextPageToken;
    }
  },

  /** No new trajectories are started; running ones finish. */
  async pause() {
    await call((done) => client.pause({}, metadata(), done));
  },

  async resume() {
    await call((done) => client.resume({}, metadata(), done));
  },
};

const command = commands[positionals[0] ?? ""];
if (command === undefined) {
  console.error(`usage: npm run control -- ${Object.keys(commands).join("|")} --coordinator HOST:PORT`);
  process.exitCode = 2;
} else {
  try {
    await command();
  } catch (error) {
    console.error(`error: ${(error as ServiceError).details || error}`);
    process.exitCode = 1;
  }
}
client.close();
