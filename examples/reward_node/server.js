/**
 * A reward service in Node.js: rlhf.v1.RewardService with rows as text, and grpc.health.v1.Health. For a reward over
 * groups also Describe of rlhf.v1.WorkerService, which says so.
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
  for (const unit of reward.overGroups ? groupsOf(rows) : rows.map((row) => [row])) {
    scores.push(...(reward.overGroups ? await scoreGroup(unit, reward) : [await scoreRow(unit[0], reward)]));
    if (scores.length % ROWS_PER_TURN < unit.length) await turn();
    if (call.cancelled) return null; // by the client, or because its deadline has passed
  }
  return scores;
}

/** The groups of a request: the rows of a group are next to each other. A row without a group is one of its own. */
function groupsOf(rows) {
  const groups = [];
  for (const row of rows) {
    const last = groups.at(-1);
    if (last !== undefined && row._group !== undefined && row.group === last[0].group) last.push(row);
    else groups.push([row]);
  }
  return groups;
}

/** The verdicts on the rows of a group; what keeps the reward from scoring it is the error of each. */
async function scoreGroup(rows, reward) {
  const { prompt, ground_truth, metadata } = rows[0];
  try {
    const responses = rows.map((row) => row.response);
    const verdicts = await reward({ prompt, responses, ground_truth, metadata: toObject(metadata) });
    if (!Array.isArray(verdicts) || verdicts.length !== rows.length) {
      throw new Error(`${verdicts?.length} scores for ${rows.length} responses`);
    }
    return verdicts.map(toScore);
  } catch (error) {
    return rows.map(() => ({ error: `${reward.name} failed: ${error}` }));
  }
}

/** The verdict on one row. */
async function scoreRow(row, reward) {
  try {
    return toScore(await reward({ ...row, metadata: toObject(row.metadata) }));
  } catch (error) {
    return { error: `${reward.name} failed: ${error}` };
  }
}

/** A verdict: a score or scores per token, all of them finite, or else an error; never a made-up zero. */
function toScore(verdict) {
  const values = Array.isArray(verdict) ? verdict : [verdict];
  if (!values.every(Number.isFinite)) return { error: `not finite: score ${values}` };
  return Array.isArray(verdict) ? { token_scores: { scores: verdict } } : { score: verdict };
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

/** The package rlhf.v1. Group numbers have 64 bits, more than a number of JavaScript: they come as strings. */
function loadProtos(protos) {
  const definition = protoLoader.loadSync(["rlhf/v1/reward.proto", "rlhf/v1/worker.proto"], {
    includeDirs: [protos],
    keepCase: true,
    defaults: true,
    oneofs: true,
    longs: String,
  });
  return grpc.loadPackageDefinition(definition).rlhf.v1;
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
  const { RewardService, WorkerService } = loadProtos(path.resolve(options.protos));
  server.addService(RewardService.service, { ComputeReward: computeReward(reward) });
  if (reward.overGroups) {
    const description = { role: "reward", scores_groups: true };
    server.addService(WorkerService.service, { Describe: (call, reply) => reply(null, description) });
  }
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
