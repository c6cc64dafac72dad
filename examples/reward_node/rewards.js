/**
 * Rewards by name. Each takes a row - prompt, response, ground_truth, metadata - and gives a score, or an array with
 * a score per response token; it may be async. What it throws becomes the row's error. One with overGroups takes
 * prompt, responses, ground_truth, metadata and gives an array with one of these per response; what it throws becomes
 * the error of all of them.
 */

/** 1 where response and ground truth are the same text, spaces at both ends apart; else 0. Throws without a truth. */
export function exact_match({ response, ground_truth }) {
  if (strip(ground_truth) === "") throw new Error("the row has no ground truth");
  return strip(response) === strip(ground_truth) ? 1 : 0;
}

/**
 * 1 for a response of the form `<think>...</think> answer`; less by 0.01 for each character beyond 200 of the answer,
 * down to 0; 0 for any other form.
 */
export function format({ response }) {
  const parts = /^<think>.+?<\/think>\s*(?<answer>\S.*)$/s.exec(strip(response));
  if (parts === null) return 0;
  const excess = Math.max([...parts.groups.answer].length - 200, 0);
  return Math.max(1 - excess / 100, 0);
}

/** Right responses to a prompt share 1 among them, so that one that few others find earns more; wrong ones get 0. */
export function shared({ responses, ground_truth }) {
  const scores = responses.map((response) => exact_match({ response, ground_truth }));
  const right = scores.reduce((sum, score) => sum + score, 0);
  return scores.map((score) => score / Math.max(right, 1));
}
shared.overGroups = true;

/** As Python's str.strip: trim() would take a byte order mark too, and leave the ASCII separators. */
function strip(text) {
  return text.replace(/^[\p{White_Space}\x1c-\x1f]+|[\p{White_Space}\x1c-\x1f]+$/gu, "");
}
