/**
 * Rewards by name. Each takes a row - prompt, response, ground_truth, metadata - and gives a score, or an array with
 * a score per response token; it may be async. What it throws becomes the row's error.
 */

/** 1 where response and ground truth are the same text, spaces at both ends apart; else 0. */
export function exact_match({ response, ground_truth }) {
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

/** As Python's str.strip: trim() would take a byte order mark too, and leave the ASCII separators. */
function strip(text) {
  return text.replace(/^[\p{White_Space}\x1c-\x1f]+|[\p{White_Space}\x1c-\x1f]+$/gu, "");
}
