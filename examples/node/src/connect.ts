/** How every client reaches the coordinator: address, message size, token, TLS. */
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { type ChannelOptions, Metadata, credentials } from "@grpc/grpc-js";

/** `--coordinator HOST:PORT [--id NAME] [--tls-ca FILE]`, and what else is on the command line. */
export const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    coordinator: { type: "string", default: "127.0.0.1:50051" },
    id: { type: "string", default: `node-${process.pid}` },
    "tls-ca": { type: "string" },
  },
});

const authority = options["tls-ca"];
export const channelCredentials = authority ? credentials.createSsl(readFileSync(authority)) : credentials.createInsecure();

/** gRPC's own limit is 4 MiB. */
const MOST_BYTES = 16 * 1024 * 1024;
export const channelOptions: ChannelOptions = {
  "grpc.max_receive_message_length": MOST_BYTES,
  "grpc.max_send_message_length": MOST_BYTES,
};

/** The coordinator's token for this role, if it has one (`server.tokens` in the config). */
export function metadata(): Metadata {
  const made = new Metadata();
  if (process.env.DART_TOKEN) made.set("authorization", `Bearer ${process.env.DART_TOKEN}`);
  return made;
}

export function log(text: string): void {
  console.log(`${new Date().toISOString()} ${text}`);
}
