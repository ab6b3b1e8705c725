// Prompts to send many chats with. Most begin with one of two long texts, so that there is something to share.

const HANDBOOK = `You are the night porter of the Hotel Meridian, a house of forty rooms by the river. You answer guests \
briefly and kindly. These are the rules of the house. Breakfast is served from seven to ten in the winter garden, and \
from eight to eleven on Sundays. The front door is locked at midnight; guests ring the brass bell and the porter opens. \
Dogs are welcome on the ground floor and sleep on their own blankets. The lift stops between one and five at night, \
since the machine room lies beside room nine. Umbrellas stand in the copper vase and may be borrowed for a day. The \
library lends books without a list, on the promise that they come back. Taxis are ordered an hour ahead. The tower room \
has no heating, a fine view, and two extra quilts in the chest. Lost things are kept for a year in the blue cupboard. \
Answer the guest's question from these rules, and say so where they do not tell.`;

const LETTER = `Read this letter and answer the question below it. Dear Ada, the sea was rough until Thursday and nobody \
left the harbour. Then the wind turned, and within an hour eleven boats were out. I went with Tomas, who has painted his \
boat green since you last saw it, and we took the nets to the sandbank by the old beacon. We caught little, but we found \
a wooden box with brass corners, nailed shut and very light. Tomas wanted to open it at once. I said we should wait for \
the harbour master, and we quarrelled the whole way back. In the end the box opened by itself when he dropped it on the \
quay: inside lay forty glass marbles packed in dry moss, and a card that said only "for the children of the island". \
They have been playing with them ever since. Come before the autumn storms. Yours, Benedikt.`;

const HANDBOOK_QUESTIONS = [
  "When is breakfast on Sunday?",
  "It is two o'clock and I am at the front door. What do I do?",
  "May my dog sleep in the tower room?",
  "Why does the lift not come?",
  "I left my scarf here last spring. Where might it be?",
  "It rains. Can I borrow an umbrella?",
  "I need a taxi in ten minutes.",
  "My room is cold. It is the tower room.",
  "Is there anything to read?",
];

const LETTER_QUESTIONS = [
  "What colour is the boat of Tomas?",
  "What was in the box?",
  "Why did the two of them quarrel?",
  "For whom were the marbles?",
  "When did the boats go out?",
  "Write a short answer to Benedikt.",
  "Where were the nets set?",
];

const ALONE = [
  "Explain in a few sentences why the sky is blue.",
  "Write a short poem about a lighthouse in winter.",
  "What is the difference between a page and a page frame?",
  "Give me three tips for learning to cook.",
  "Tell a story about a fox who could count to seven.",
  "How does a bicycle stay upright?",
  "List five uses for an old jam jar.",
  "Describe the smell of rain to somebody who never smelled it.",
];

const shared = [
  ...HANDBOOK_QUESTIONS.map((question) => `${HANDBOOK}\n\n${question}`),
  ...LETTER_QUESTIONS.map((question) => `${LETTER}\n\n${question}`),
];

/** By the name that the page offers: lists of prompts, used in order and from the beginning again. */
export const PROMPT_SETS = {
  mixed: shared.flatMap((prompt, index) => (index % 2 ? [prompt, ALONE[(index - 1) / 2]] : [prompt])),
  shared,
  alone: ALONE,
};
