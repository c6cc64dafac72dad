/**
 * A reward service in Node.js: rlhf.v1.RewardService with rows as text, and grpc.health.v1.Health.
 *
 *     node server.js --port 7204 --reward exact_match
 *
 * It prints "ready" when it serves, and on SIGTERM or SIGINT finishes the calls it has.
 */

import path from "node:path";
import { setImmediate as turn } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { HealthImplementation } from "grpc-health-check";

import * as rewards from "./rewards.js";

const SERVICE = "rlhf.v1.RewardService";
const PROTOS = fileURLToPath(new URL("../../protos", import.meta.url));
const DRAIN_MS = 10_000;
/** Rows scored before health checks, cancellations and other calls get a turn. */
const ROWS_PER_TURN = 64;
/** A step's rows come in one message: gRPC's default of 4 MiB is soon too little. */
const SERVER_OPTIONS = { "grpc.max_receive_message_length": 1 << 30, "grpc.so_reuseport": 0 };

/** Scores the rows of a request, in order; null where nobody waits for the answer any more. */
async function scoreRows(rows, reward, call) {
  const scores = [];
  for (const row of rows) {
    scores.push(await scoreRow(row, reward));
    if (scores.length % ROWS_PER_TURN === 0) await turn();
    if (call.cancelled) return null; // by the client, or because its deadline has passed
  }
  return scores;
}

/** The verdict on one row: a score or scores per token, all of them finite, or else an error; never a made-up zero. */
async function scoreRow(row, reward) {
  try {
    const verdict = await reward({ ...row, metadata: toObject(row.metadata) });
    const values = Array.isArray(verdict) ? verdict : [verdict];
    if (!values.every(Number.isFinite)) return { error: `not finite: score ${values}` };
    return Array.isArray(verdict) ? { token_scores: { scores: verdict } } : { score: verdict };
  } catch (error) {
    return { error: `${reward.name} failed: ${error}` };
  }
}

/** A google.protobuf.Struct, as proto-loader gives it, as a plain object. */
function toObject(struct) {
  const entries = Object.entries(struct?.fields ?? {});
  return Object.fromEntries(entries.map(([key, value]) => [key, toValue(value)]));
}

function toValue(value) {
  switch (value.kind) {
    case "structValue":
      return toObject(value.structValue);
    case "listValue":
      return value.listValue.values.map(toValue);
    case "nullValue":
      return null;
    default:
      return value[value.kind];
  }
}

/** ComputeReward: the request is refused as a whole where it is no request for rows of text. */
function computeReward(reward) {
  return async (call, reply) => {
    const { text_rows: rows, batch } = call.request;
    if (batch !== null) {
      return reply({ code: grpc.status.INVALID_ARGUMENT, details: "this reward reads text: send text_rows" });
    }
    const scores = await scoreRows(rows, reward, call);
    if (scores !== null) reply(null, { scores });
  };
}

function loadService(protos) {
  const definition = protoLoader.loadSync("rlhf/v1/reward.proto", {
    includeDirs: [protos],
    keepCase: true,
    defaults: true,
    oneofs: true,
  });
  return grpc.loadPackageDefinition(definition).rlhf.v1.RewardService.service;
}

function main() {
  const { values: options } = parseArgs({
    options: {
      host: { type: "string", default: "127.0.0.1" },
      port: { type: "string", default: "7204" },
      reward: { type: "string", default: "exact_match" },
      protos: { type: "string", default: PROTOS },
    },
  });
  const reward = rewards[options.reward];
  if (reward === undefined) {
    throw new Error(`no reward ${options.reward}; known: ${Object.keys(rewards).join(", ")}`);
  }
  const server = new grpc.Server(SERVER_OPTIONS);
  server.addService(loadService(path.resolve(options.protos)), { ComputeReward: computeReward(reward) });
  const health = new HealthImplementation({ "": "SERVING", [SERVICE]: "SERVING" });
  health.addToServer(server);

  const drain = () => {
    health.setStatus("", "NOT_SERVING");
    health.setStatus(SERVICE, "NOT_SERVING");
    server.tryShutdown(() => process.exit(0));
    setTimeout(() => server.forceShutdown(), DRAIN_MS).unref();
  };
  process.once("SIGTERM", drain);
  process.once("SIGINT", drain);

  server.bindAsync(`${options.host}:${options.port}`, grpc.ServerCredentials.createInsecure(), (error) => {
    if (error) throw error;
    console.log("ready");
  });
}

main();
