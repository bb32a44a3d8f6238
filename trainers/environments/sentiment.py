"""Continue a neutral opening in a positive tone; the reward is VADER's compound score of the continuation, in [-1, 1].

Hutto and Gilbert 2014, "VADER: A parsimonious rule-based model for sentiment analysis of social media text".
"""

from collections.abc import Sequence

from trainers.environments import Prompt, Sample
from trainers.extras import require

# Each scores 0 by itself, so that whatever tone a continuation has is the model's.
OPENINGS = (
    "The movie was",
    "My day at work was",
    "The hotel room was",
    "The food at the restaurant was",
    "I opened the letter and",
    "The meeting this morning was",
    "When she came home, she",
    "The book I read last week was",
    "My neighbour told me that",
    "The weather on our trip was",
    "The new phone is",
    "The teacher looked at us and",
    "Our flight to the city was",
    "The service at the shop was",
    "After the concert, we",
    "The people in this town are",
)


class SentimentEnvironment:
    default_model = "smollm2-135m"

    def __init__(self) -> None:
        self._analyzer = require("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer()

    def prompts(self) -> list[Prompt]:
        return [Prompt(text) for text in OPENINGS]

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [self.positivity(sample.response) for sample in samples]

    def positivity(self, text: str) -> float:
        return float(self._analyzer.polarity_scores(text)["compound"]) if text.strip() else 0.0
