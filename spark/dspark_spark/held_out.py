"""Prompts for benchmarks and greedy comparisons, none of which the shipped drafter was trained on.

`SELF_WRITTEN` are held-out instructions of the drafter's own corpus: the target wrote them, like those that it was
trained on (every complete instruction of the held-out conversations, in corpus order). `PROMPTS` are written by hand:
what people ask, which is another distribution and the harder one.
"""

from __future__ import annotations

PROMPTS = (
    "Explain why the sky is blue to a ten-year-old.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the main differences between a virus and a bacterium?",
    "Give me a simple recipe for vegetable soup and list the steps.",
    "Write a Python function that returns the n-th Fibonacci number and explain it.",
    "How does a bicycle stay upright when it is moving?",
    "Write an email to my landlord asking to repair the broken heating.",
    "Summarize the causes of the French Revolution in a paragraph.",
    "What should I consider before adopting a dog from a shelter?",
    "Describe the water cycle step by step.",
    "Write a poem about the first snow of the winter.",
    "How can I improve my sleep without medication?",
    "Compare trains and planes for travelling between two cities.",
    "What is machine learning, and what is it used for?",
    "Plan a three-day trip to a city by the sea for a family with two children.",
    "Explain the difference between weather and climate with examples.",
    "Write a dialogue between a customer and a shopkeeper about a broken clock.",
    "What are the benefits of learning a second language?",
    "Give five tips for a first job interview.",
    "Explain how vaccines train the immune system.",
    "Write a product description for a reusable water bottle.",
    "Why do leaves change colour in autumn?",
    "How do I start a small vegetable garden on a balcony?",
    "Tell me about the history of the printing press.",
    "What is inflation, and how does it affect ordinary people?",
    "Write a motivational speech for a school sports team before a final.",
    "How does a refrigerator keep food cold?",
    "Explain the rules of chess to a beginner.",
    "What makes a good password, and how should I store it?",
    "Write a letter from a grandmother to her grandson who starts university.",
    "Describe how bread is made, from flour to loaf.",
    "What are the most important inventions of the twentieth century?",
    "Explain photosynthesis and why it matters.",
    "Write a short fairy tale about a clever fox and a lazy bear.",
    "How can a small company reduce its energy use?",
    "What is the role of a judge in a court of law?",
    "Suggest a weekly exercise plan for someone who sits all day.",
    "Explain what a black hole is.",
    "Write a review of an imaginary restaurant by the river.",
    "How did people tell the time before clocks?",
    "What are the steps to solve a quadratic equation?",
    "Describe a busy market in the morning.",
    "Why is biodiversity important for agriculture?",
    "Write instructions for changing a flat bicycle tyre.",
    "What is the difference between a star and a planet?",
    "Give advice to a friend who is nervous about moving abroad.",
    "Explain how a search engine finds web pages.",
    "Write a short speech for the opening of a public library.",
    "What happens in the body when we run?",
    "Explain supply and demand with the example of a lemonade stand.",
)

SELF_WRITTEN = (
    "Translate the following sentence from English to Spanish:\n“I want to go to the movies tonight”",
    "Plan a surprise wedding at home with the help of my girlfriend.",
    "I want to create a new recipe that uses only the chocolate in one ingredient that will be used to "
    "make it. Can you help me with a recipe here?",
    "What is the difference between the merc with a max of 20 color out of 50 and the merc with a max of 40.",
    "Explain the feasibility of building a self-sustaining, climate-resilient city model using renewable "
    "energy resources in the context of cities.",
    "Who was Martin Bateman?\nMartin Bateman was a 1980s male detective who was the founder of the "
    "organization BATF.",
    "Tell me about the Royal Caribbean 14-day world tour. What was it like for a team of 2?",
    "Plan a 2-week trip to the Bahamas for a mix of cultural experiences, adventure, and relaxation.",
    "Give three ways to create a delicious dish with only 10 ingredients.",
    "Can you help me with a recipe for a vegan baby food blend?",
    "My child is 8 years old. They're spending the summer with the grandparents and they're always having "
    "fun by the pool. Now I'm not sure if I should bring them to the store without careful planning. What "
    "are my options?",
    "Where is the most haunted location in the world?",
    "Suggest an app for beginners who want to start with online shopping.",
    "I'm planning to launch a new fitness platform and want to ensure it's a safe and secure place for "
    "people to connect and share fitness insights. Can you provide a list of the steps to make that "
    "happen?",
    "Please write a professional unit email copy of a resume for the position of QA engineer.",
    "How can I improve my public speaking skills?",
    "Can you provide a detailed explanation of the moon's orbit around Earth?",
    "I'm in need of a new fitness tracker that can track my sleep patterns. Can you recommend a good one?",
    "Give three ways to use the price model to protect yourself from profit during a pandemic.",
    "Can you provide a code snippet in Python that can create a random permutation of a list of integers?",
    "I'm struggling to decide between the \"Minion buddy\" and the \"Bond Boss\" titles I see on social "
    "media. What are the differences and which one is the best fit for me?",
    "A man named Spock was mentioned in the movie Star Wars: The Last Jedi. Can stars in the movie Star "
    "Wars: The Last Jedi be the ship's crew?",
    "I want to create a new product that helps reduce plastic waste in our oceans. Could you help me with that?",
    "Write a short story about a mysterious antique shop with a magic box. What's the main plot of the story?",
    "Write a short story about a magical throne that holds the memories of the past. Can you give me a "
    "possible scenario using this magical throne?",
    "Can you provide a step-by-step guide to getting started with a new yoga class?",
    "Could you explain the difference between a capacitor and a diode in electrical circuits?",
    "If I have a bad habit of using a certain type of sunscreen but have been using something else this "
    "week, how can I make sure I am safe from sun damage today?",
    "Why do we need to implement automation in the manufacturing of AI for machine learning?",
    "How do I prepare for a job interview in 2024?",
    "Can you provide a comprehensive guide on how to prepare for a job interview in the tech industry?",
    "Give me a recipe to make a perfect homemade lasagna.",
    "Can you provide a list of the top 5 sustainable products available on eBay?",
    "Can you translate \"China's fast-moving lanterns\" to an Italian?",
    "Can you provide a list of the top 1000 most used and popular health products in the world?",
    "Could you explain what a \"fun\" is to me?",
    "I'm looking for a new home to rent and I'm considering a place with a family. Can you help me find a "
    "place that caters to families?",
    "Write a poem about Ikea, on a Christmas Eve at my home in Angelo, Italy, spanish aloto al liego, or "
    "I am a millionaire.",
)

PROMPT_SETS = {"self": SELF_WRITTEN, "people": PROMPTS}
