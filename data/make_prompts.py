#!/usr/bin/env python3
"""Write the training prompts (data/prompts/train.jsonl).

Prompts of seven kinds are made from templates, word lists and hand-written
prompts, all of them in this file. The output depends only on --seed and
--per-kind, and the same arguments give the same bytes. Each block of seven
lines holds one prompt of each kind, so every prefix of the file is balanced.

In a template, {name} stands for a random entry of SLOTS["name"]; the same slot
has the same value throughout a prompt, and {name2} a different one. {10-90} is
a random whole number, and a/an becomes the article that fits the next word.

The script fails if a prompt is longer than MAX_WORDS, or if one equals or
nearly equals a held-out prompt (data/prompts/heldout.jsonl): that is, if they
share more than MAX_OVERLAP of the shorter one's word 5-grams.

    python3 data/make_prompts.py
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

KINDS = ["conversation", "translation", "summarization", "qa", "math", "rag", "code"]
MAX_WORDS = 180
NGRAM = 5
MAX_OVERLAP = 0.25
PROMPTS_DIR = Path(__file__).resolve().parent / "prompts"


def words(text):
    """The comma-separated entries of a word list."""
    return [w.strip() for w in text.replace("\n", " ").split(",") if w.strip()]


def lines(text):
    """The non-empty lines of a block, with a written \\n turned into a line break."""
    return [s.strip().replace("\\n", "\n") for s in text.splitlines() if s.strip()]


# ---------------------------------------------------------------- word lists

SLOTS = {
    "name": words("""Amir, Bea, Carlos, Daria, Elif, Femi, Greta, Hugo, Imani, Jonas, Keiko, Leon, Mira,
        Nadia, Oscar, Priya, Ravi, Sofia, Tomas, Uma, Viktor, Wanda, Yusuf, Zoe, Anika, Bruno, Chloe,
        Dmitri, Esther, Farid, Gwen, Hana, Ivo, Joanna, Kofi, Lena, Marco, Noor, Otto, Paula, Samuel,
        Tess, Vera, Wei, Ximena, Adele, Boris, Celine, Dario, Emil"""),
    "woman": words("""Alma, Beatrix, Carla, Dora, Elena, Flora, Gina, Helena, Ines, Julia, Katrin, Laura, Marta, Nora,
        Olivia, Petra, Ruth, Sara, Teresa, Valerie"""),
    "town": words("""Alderby, Brackwater, Castor Bay, Dunmere, Eastholm, Fairleigh, Grenholt, Hartwick,
        Ilverton, Juniper Falls, Kelso Ridge, Lindow, Marrowby, Northgate, Oakhaven, Pinecrest, Ravensford,
        Saltmarsh, Thornbury, Upper Wickley, Vale Cross, Westbrook, Yarrow Hill, Ashford Mill, Cedar Point,
        Lyon, Turin, Porto, Leipzig, Seville, Bergen, Ghent, Kyoto, Lima, Halifax"""),
    "country": words("""Japan, Brazil, Kenya, Canada, Norway, Egypt, India, Mexico, Italy, Thailand, Peru, Poland,
        Greece, Morocco, Vietnam, Iceland, Chile, Portugal, Indonesia, Turkey, Finland, Argentina, Ghana,
        New Zealand, South Korea, Ethiopia, Ireland, Nepal, Cuba, Switzerland, Australia, Spain, Sweden,
        Nigeria, Colombia, Austria, Jordan, Mongolia, Madagascar, Denmark"""),
    "job": words("""baker, plumber, nurse, carpenter, librarian, pilot, florist, tailor, chemist,
        farmer, bus driver, tour guide, dentist, gardener, mechanic, translator, photographer, shepherd,
        detective, blacksmith, chef, piano tuner, firefighter, bookbinder, sculptor, postal worker, vet,
        surveyor, electrician, journalist, museum curator, fisherman, midwife, barber, roofer, potter,
        geologist, train conductor, stage magician, wedding planner, market trader"""),
    "object": words("""old suitcase, silver key, broken radio, wool scarf, brass compass, chipped teacup, leather diary,
        red bicycle, wooden ladder, torn map, pocket watch, rusty lantern, glass marble, typewriter,
        folding chair, garden gnome, paper boat, copper kettle, violin case, rain barrel, music box,
        fishing rod, snow globe, sewing machine, toy train, walking stick, straw hat, door bell, blue vase,
        camera, jigsaw puzzle, postcard, chess clock, blanket, telescope, stapler"""),
    "animal": words("""dolphin, hedgehog, barn owl, elephant, penguin, camel, fox, sea turtle, giraffe, wolf, otter,
        hummingbird, bat, salmon, kangaroo, polar bear, honeybee, squirrel, crocodile, flamingo, spider,
        badger, whale, parrot, moose, lizard, chameleon, ant, swan, goat, seal, cheetah, jellyfish,
        woodpecker, gorilla, snail, eagle, yak, tiger, reindeer"""),
    "large_animal": words("""kangaroo, camel, goat, moose, reindeer, yak, giraffe, elephant, tiger, zebra, bear, gorilla,
        ostrich, rhino, lion, donkey"""),
    "shy_animal": words("""hedgehog, fox, badger, otter, barn owl, squirrel, lizard, woodpecker, raccoon, marten, polecat,
        dormouse"""),
    "dish": words("""lentil soup, apple pie, mushroom risotto, vegetable curry, fried rice, potato salad, banana bread,
        fish tacos, pancakes, tomato sauce, chicken stew, hummus, roasted carrots, dumplings, bean chili,
        spinach lasagna, rice pudding, omelette, pumpkin soup, garlic bread, noodle salad, meatballs,
        couscous, fruit crumble, pizza, stuffed peppers, oatmeal, beetroot salad, paella, cheese scones"""),
    "hobby": words("""painting, running, chess, knitting, bird watching, photography, gardening, baking, cycling,
        pottery, swimming, hiking, guitar playing, sailing, woodwork, dancing, stargazing, yoga,
        rock climbing, beekeeping, poetry writing, choir singing, sketching, skiing, juggling,
        table tennis, calligraphy, fishing, model trains, sewing, archery, cooking"""),
    "topic": words("""public transport, remote work, city parks, school uniforms, solar power, home cooking,
        social media, space travel, recycling, electric cars, learning languages, team sports, video games,
        zoos, fast fashion, tourism, local newspapers, robots at work, nuclear energy, museum entry fees,
        daily exercise, online shopping, working at night, organic farming, exams in schools, street art,
        owning a pet, library funding, tap water, plastic packaging, sleep, volunteering, noise in cities,
        paper books, homework, cycling lanes, food waste, smart phones in class, tipping in restaurants,
        four-day weeks, wind farms, living alone, growing vegetables, board games, handwriting, small shops,
        night trains, house plants, open offices, free concerts, second-hand clothes, mountain rescue"""),
    "science": words("""photosynthesis, gravity, magnetism, evaporation, plate tectonics, evolution, electric current,
        sound waves, the water cycle, black holes, vaccines, DNA, friction, nuclear fusion, rainbows,
        fermentation, osmosis, tides, volcanoes, radioactivity, the greenhouse effect, lenses,
        batteries, enzymes, earthquakes, buoyancy, lightning, the ozone layer, memory, digestion,
        the immune system, erosion, catalysts, solar eclipses, semiconductors, crystals, hormones,
        the Doppler effect, entropy, the speed of light, supernovas, stem cells, acids and bases, lasers,
        blood pressure, optical illusions, surface tension, heat pumps, red dwarfs, antibiotics"""),
    "humanity": words("""the French Revolution, the Renaissance, the Silk Road, ancient Athens, the Roman Empire,
        the printing press, the Industrial Revolution, the Cold War, stoic philosophy, the Magna Carta,
        Greek tragedy, the Enlightenment, the Black Death, Gothic cathedrals, the fall of the Berlin Wall,
        the Ottoman Empire, impressionist painting, jazz music, the Age of Sail, feudalism, the Vikings,
        the suffrage movement, utilitarianism, Shakespeare's comedies, the Great Depression, the Inca roads,
        the Marshall Plan, Buddhist art, free will, the social contract, existentialism, folk tales,
        the abolition of slavery, the Mongol Empire, medieval guilds, Confucian thought, the Aztecs,
        modern architecture, the League of Nations, romantic poetry, the gold standard, ancient Egypt"""),
    "invention": words("""the telephone, the steam engine, the light bulb, the compass, paper, the microscope,
        the bicycle, the camera, the airplane, the radio, the zipper, the refrigerator, the elevator,
        the sewing machine, the barometer, the typewriter, the X-ray machine, penicillin, dynamite, glass,
        the transistor, the wheel, concrete, the thermometer, the World Wide Web, the ballpoint pen,
        gunpowder, the pendulum clock, the vacuum cleaner, the tin can, the parachute, the calculator"""),
    "food": words("""chocolate, cheese, coffee, bread, olive oil, pasta, tofu, yogurt, vinegar, sugar, tea, butter,
        maple syrup, soy sauce, rice, mustard, cinnamon, black pepper, sea salt, kimchi, peanut butter, cider"""),
    "body": words("""the heart, the liver, the lungs, the kidneys, the skin, the stomach, the inner ear, the eye,
        the brain, the spine, the pancreas, bone marrow, the knee, red blood cells, the tongue, muscles"""),
    "pair": words("""a frog and a toad, weather and climate, a virus and a bacterium, stalactites and stalagmites,
        an alligator and a crocodile, speed and velocity, mass and weight, a simile and a metaphor,
        a moth and a butterfly, jam and marmalade, a novel and a novella, debit and credit cards,
        a lake and a lagoon, inflation and deflation, an opera and a musical, a rabbit and a hare,
        asteroids and planets, baking soda and baking powder, a democracy and a republic, fog and mist,
        a cold and the flu, a mean and a median, a fruit and a nut, a glacier and an iceberg,
        empathy and sympathy, renting and leasing, a barrister and a judge, copyright and patents,
        a harp and a lyre, vitamins and minerals, a typhoon and a tornado, RAM and storage"""),
    "tone": words("""friendly, formal, humorous, calm, dramatic, sarcastic, hopeful, matter-of-fact, poetic, gentle,
        excited, gloomy, polite, confident, mysterious, cheerful"""),
    "audience": words("""a curious teenager, a group of retirees, a five-year-old, a new colleague, a visitor from abroad,
        a sceptical friend, first-year students, busy parents, complete beginners, a classroom of twelve-year-olds,
        my grandmother, a panel of experts, the readers of a village newsletter, someone in a hurry"""),
    "place": words("""a crowded night train, a greenhouse in winter, an abandoned cinema, a desert petrol station,
        a mountain hut, a floating market, a space station, a tiny bookshop, a hospital waiting room,
        a rooftop garden, a frozen lake, an old harbour, a school kitchen, a village fair, a submarine,
        an airport at midnight, a ruined castle, a laundrette, a quiet library, a circus tent,
        an apple orchard, a busy post office, a moon colony, a railway museum, a beach after a storm"""),
    "event": words("""street festival, book fair, charity run, science night, film evening, plant swap, chess tournament,
        open-air concert, cooking contest, school play, craft market, river clean-up, poetry reading, job fair,
        bicycle parade, photography exhibition, harvest dinner, repair workshop, dance evening, quiz night"""),
    "building": words("""library, swimming hall, town hall, railway station, cinema, theatre, sports centre, museum,
        youth club, old brewery, fire station, covered market, primary school, bus depot, post office,
        community centre, art gallery, water tower, boathouse, bakery"""),
    "product": words("""electric kettle, rain jacket, desk lamp, pair of headphones, backpack, blender, office chair,
        tent, coffee grinder, water bottle, keyboard, hiking boot, alarm clock, air mattress, toaster,
        cordless drill, yoga mat, bike helmet, table fan, sleeping bag, rice cooker, garden hose, phone stand"""),
    "company": words("""Brightwell, Norda Systems, Green Anchor, Loomis & Hart, Pavo Foods, Quillon, Redfern Tools,
        Solvik, Tarn Energy, Umbra Optics, Velo North, Wicker & Sons, Zephyr Rail, Corvus Labs, Delta Mills"""),
    "month": words(
        "January, February, March, April, May, June, July, August, September, October, November, December"
    ),
    "day": words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "season": words("spring, summer, autumn, winter"),
    "hour": words("seven, eight, nine, ten, eleven, two, three, four, five, six"),
    "color": words("red, blue, green, yellow, purple, orange, white, grey, pink, brown"),
    "fruit": words(
        "apples, pears, oranges, plums, lemons, peaches, mangoes, cherries, figs, melons, kiwis, grapes"
    ),
    "item": words(
        "pencils, stickers, notebooks, marbles, buttons, postcards, tickets, candles, badges, seeds, bricks, tiles"
    ),
    "vehicle": words("train, bus, car, truck, ferry, tram, cyclist, motorbike, van, coach"),
    "language": words(
        "French, German, Spanish, Italian, French, German, Spanish, Italian, Portuguese, Dutch"
    ),
    "prog": words(
        "Python, Python, Python, JavaScript, Java, C, C++, Go, Rust, TypeScript, Ruby, Kotlin, C#"
    ),
    "style": words("""a haiku, a limerick, a short fable, a diary entry, a radio advert, a four-line poem, a fairy tale opening,
        a news report, a product description, a song chorus, a scene with dialogue, a letter, a riddle,
        a speech, a blog post, a thank-you note, a travel guide entry, a monologue, an obituary, a toast"""),
    "character": words("""a pirate captain who is afraid of water, a medieval doctor, a talking oak tree, a robot butler,
        a retired spy, an overworked elf, an alien on a first visit to Earth, a strict piano teacher, a dragon who sells
        insurance, a sleepy night guard, an ancient Roman cook, a very polite ghost, a football coach,
        a time traveller from 1850, an explorer at the South Pole, a cat who runs a hotel, a weather forecaster,
        a knight with a cold, a wise ferry operator, a jealous mirror, a proud snowman, an opera singer,
        a street musician, a bored king, a travel agent for mermaids, a lost astronaut"""),
    "symptom": words("""I keep missing deadlines, my kitchen is too small, I can't fall asleep, I feel nervous before speeches,
        my plants keep dying, my phone battery is always empty, I never finish books, I spend too much on lunch,
        I forget people's names, my neighbours are loud, I want to get up earlier, my team meetings drag on,
        I have just moved to a new city, my bike was stolen, I argue with my brother about chores,
        my desk is always a mess, I have to cook for ten guests, I want to change my career"""),
    "task": lines("""
        reverses a string without using built-in reverse helpers
        checks whether a word is a palindrome
        counts the vowels in a sentence
        returns the n-th Fibonacci number
        finds the largest and the smallest number in a list
        removes duplicates from a list while keeping the order
        merges two sorted lists into one sorted list
        checks whether a number is prime
        lists all prime numbers below a limit
        computes the greatest common divisor of two integers
        converts Celsius to Fahrenheit and back
        counts how often each word occurs in a text
        sorts a list with bubble sort
        sorts a list with merge sort
        sorts a list with quicksort
        performs a binary search in a sorted array
        rotates a list by k positions
        transposes a matrix
        multiplies two matrices
        validates an email address in a simple way
        checks whether brackets in an expression are balanced
        converts a decimal number to binary
        converts a hexadecimal string to an integer
        computes the factorial of a number recursively
        finds the second largest value in an array
        checks whether two words are anagrams
        groups a list of words by their first letter
        capitalises the first letter of each word
        compresses a string with run-length encoding
        encrypts a message with a Caesar cipher
        generates a random password of a given length
        flattens a nested list
        finds the longest word in a sentence
        computes the average and the median of a list
        computes the standard deviation of a list of numbers
        checks whether a year is a leap year
        counts the days between two dates
        formats a number of seconds as hours, minutes and seconds
        reads a CSV file and sums one column
        writes a list of records to a JSON file
        prints a multiplication table
        prints a triangle of stars
        plays rock, paper, scissors against the user
        plays a number-guessing game with the user
        keeps a simple to-do list in memory
        models a bank account with deposit and withdraw
        implements a stack with push, pop and peek
        implements a queue using two stacks
        implements a singly linked list with insert and delete
        reverses a linked list
        inserts values into a binary search tree
        walks a binary tree in order
        finds the depth of a binary tree
        runs a breadth-first search on a graph
        runs a depth-first search on a graph
        finds the shortest path in a grid
        computes Pascal's triangle up to n rows
        finds all pairs in a list that add up to a target
        finds the missing number in the range 1 to n
        finds the longest common prefix of several strings
        finds the most common element of a list
        splits a list into chunks of equal size
        computes the sum of the digits of a number
        checks whether a password is strong enough
        counts the lines, words and characters of a file
        renames all files in a folder to lower case
        finds duplicate files in a folder by their content
        downloads a page and prints its title
        parses a query string into key and value pairs
        retries a failing operation up to three times
        caches the results of an expensive function
        measures how long a function takes to run
        rolls two dice a thousand times and counts the sums
        shuffles a deck of cards and deals four hands
        computes compound interest over several years
        converts an amount between two currencies with a fixed rate
        calculates the body mass index
        draws a simple bar chart in the terminal
        checks a Sudoku row for repeated digits
        finds all permutations of a string
        finds all subsets of a set
        solves the knapsack problem with dynamic programming
        computes the edit distance between two words
        finds the longest increasing subsequence
        evaluates an arithmetic expression in postfix notation
        converts a temperature table from a text file
        removes punctuation from a text
        checks whether one list is a sublist of another
        interleaves two lists element by element
        swaps two variables without a third one
    """),
    "cs": words("""recursion, a hash table, a linked list, big-O notation, a race condition, an API, inheritance, polymorphism,
        a closure, garbage collection, a pointer, unit testing, version control, a callback, an index in a database,
        a binary tree, memoisation, a compiler, dependency injection, a mutex, an iterator, a decorator,
        exception handling, a virtual machine, a deadlock, type inference, lazy evaluation, a websocket,
        the stack and the heap, encapsulation, asynchronous programming, a regular expression, caching,
        a foreign key, tail recursion, a design pattern, immutability, a load balancer, JSON, HTTP status codes"""),
    "table": lines("""
        orders(id, customer_id, total, created_at)
        employees(id, name, department, salary)
        books(id, title, author, year, pages)
        students(id, name, class, grade)
        products(id, name, category, price, stock)
        flights(id, origin, destination, departs_at, seats)
        movies(id, title, genre, rating, year)
        invoices(id, client, amount, due_date, paid)
        matches(id, home_team, away_team, home_goals, away_goals)
        sensors(id, location, temperature, measured_at)
        recipes(id, name, minutes, servings)
        visits(id, page, user_id, visited_at)
    """),
    "query": lines("""
        shows the ten rows with the highest number in the main numeric column
        counts the rows per group and sorts the groups by size
        finds the rows that were added most recently
        computes the average of a numeric column per category
        finds duplicates
        lists only groups with more than five rows
        returns the second highest value
        updates one column for all rows that match a condition
        deletes the rows that are older than a year
        adds a suitable index and says which query it helps
    """),
    "ui": words("""login form, to-do list, photo gallery, navigation bar, pricing table, contact form, countdown timer,
        dark-mode switch, star rating, quiz with three questions, calculator, weather card, image carousel,
        progress bar, modal dialog, sticky header, recipe card, calendar for one month, shopping cart, tip calculator"""),
    "shell": lines("""
        backs up a folder to a dated archive
        counts the files of each extension in a folder
        deletes log files that are older than a week
        prints the five most common words of a text file
        checks whether a website answers and prints the status
        renames all .jpeg files to .jpg
        shows how full each disk is and warns above 90 percent
        converts every line of a file to upper case
        finds all lines that contain the word "error" and numbers them
        waits until a file appears and then prints its size
        splits a large file into parts of 1000 lines
        lists the users who are logged in, sorted by name
    """),
    "snippet": lines("""
        def mean(xs):\\n    total = 0\\n    for x in xs:\\n        total += x\\n    return total / len(xs)
        def last(items):\\n    return items[len(items)]
        def add_item(item, box=[]):\\n    box.append(item)\\n    return box
        for i in range(1, 10):\\n    if i % 3 = 0:\\n        print(i)
        def fact(n):\\n    return n * fact(n - 1)
        words = text.split()\\ncounts = dict()\\nfor w in words:\\n    counts[w] += 1
        def is_even(n):\\n    if n % 2 == 0:\\n        return True\\n    else:\\n        return False
        let total = 0;\\nfor (let i = 0; i <= prices.length; i++) {\\n  total += prices[i];\\n}
        const sum = (a, b) => { a + b };\\nconsole.log(sum(2, 3));
        int a[5];\\nfor (int i = 0; i <= 5; i++)\\n    a[i] = i * i;
        char *s;\\nstrcpy(s, "hello");\\nprintf("%s", s);
        def grade(score):\\n    if score > 50: return "pass"\\n    if score > 80: return "good"\\n    return "fail"
        x = input("Age: ")\\nif x > 18:\\n    print("adult")
        def fib(n):\\n    if n < 2:\\n        return n\\n    return fib(n - 1) + fib(n - 2)
        data = [5, 2, 9]\\nresult = data.sort()\\nprint(result[0])
        while count < 10:\\n    print(count)\\ncount += 1
        try:\\n    value = int(raw)\\nexcept:\\n    pass\\nprint(value)
        a = [1, 2, 3]\\nb = a\\nb.append(4)\\nprint(a)
        SELECT name, COUNT(*)\\nFROM employees\\nWHERE COUNT(*) > 1;
        String s = "yes";\\nif (s == new String("yes")) System.out.println("same");
        squares = [n * n for n in range(10) if n % 2]\\nprint(sum(squares))
        pairs = zip(names, ages)\\noldest = max(pairs, key=lambda p: p[1])\\nprint(oldest)
        def flatten(t):\\n    return [x for row in t for x in row]
        func div(a int, b int) int {\\n    return a / b\\n}
        let v = vec![1, 2, 3];\\nlet w = v;\\nprintln!("{:?}", v);
        const copy = items;\\ncopy.sort();\\nconsole.log(items === copy);
    """),
}

# ---------------------------------------------------------------- conversation

CONVERSATION = lines("""
    Write {style} about a/an {object}. Use a {tone} tone.
    Write {style} set in {place}.
    Write {style} in which a/an {animal} and a/an {job} meet for the first time.
    Compose {style} for the {event} in {town}.
    Tell me a short story that begins in {place} and ends with a/an {object}.
    Write the first paragraph of a novel about a {color} {building} and a {job} called {name}.
    Write a {tone} dialogue between {name}, a {job}, and {name2}, who has lost a/an {object}.
    Describe {place} through the eyes of a {job}. Appeal to at least three senses.
    Draft an email to my boss {name} asking for a day off on {day} to attend a {event}.
    Draft a {tone} complaint to {company} about a/an {product} that stopped working after {2-9} weeks.
    Write an invitation to a {event} in {town} on the {4-20}th of {month}. Keep it under {60-120} words.
    Write a {tone} blog introduction about {hobby} for {audience}.
    Write a product description for a/an {product} made by {company}. The tone should be {tone}.
    Help me write a speech of about one minute on {topic} for {audience}.
    Give me {4-8} catchy titles for an article about {topic}.
    Give arguments for and against {topic}, then say which side you find stronger.
    Write a persuasive paragraph about {topic}, aimed at {audience}.
    I'd like to start {hobby}. Give me a plan for the first {2-6} weeks.
    Here is my problem: {symptom}. What should I try first?
    Be honest with me: {symptom}. Give me {3-6} practical ideas and one question to think about.
    Plan a weekend in {town} for {name} and {name2}, who love {hobby} but hate crowds.
    Plan a {2-6}-day trip to {country} for {audience} on a small budget.
    Suggest a menu for a birthday dinner that must include {dish}. One guest is a vegetarian.
    How do I make {dish}? List the ingredients and then numbered steps.
    Act as {character}. Someone asks you for advice on {topic}. Reply in character.
    Pretend that you are {character}. Describe a normal {day} in your life.
    You are {character} at a job interview for the post of {job}. Answer the question: why should we hire you?
    Let's play a game: you are {character} and I am a {job}. Start the conversation in {place}.
    Imagine {character} had to explain {science}. What would they say?
    Speak as {character} and review a plate of {dish}.
    Take the role of a patient language teacher. {name} has asked how to say hello and thank you in {language}. Answer.
    You're a museum guide. Introduce a/an {object} that is said to have belonged to {character}.
    {name} is older than {name2} but younger than {name3}. Who is the youngest of the three? Explain step by step.
    In a race, {name} finishes before {name2}, and {name3} finishes after {name2}. Who came in last? Show your reasoning.
    There are three boxes: a {color} one, a {color2} one and a {color3} one. The {object} is not in the {color} box, and the {color2} box is empty. Where is it?
    Every {job} in {town} owns a bicycle. {name} lives in {town} and owns a bicycle. Does it follow that {name} is a {job}? Explain.
    If today is {day}, what day of the week will it be in {10-99} days? Explain how you worked it out.
    {name} says that {name2} took the {object}. {name2} says that {name} is lying. Only one of them tells the truth. What can we conclude?
    A {job} must carry a/an {object}, a/an {object2} and a {product} up a hill but can take only two things at a time. How many trips are needed, and why?
    Explain {science} to {audience}.
    What are the most common misunderstandings about {science}?
    Use an everyday comparison with cooking or sport to explain {science}.
    How would daily life change if {science} did not exist or did not work as it does?
    Design a simple home or classroom experiment about {science}. Name the materials.
    Write a quiz with {3-5} multiple-choice questions on {science} and give the answers.
    Explain how {invention} works, in plain words, to {audience}.
    How are {science} and {science2} connected, if at all?
    What were the main causes and effects of {humanity}? Answer in a short paragraph or two.
    Why does {humanity} still matter today?
    Compare {humanity} with {humanity2}. What do they share, and where do they differ?
    Imagine an interview with someone who lived through or studied {humanity}. Write three questions and answers.
    Teach me about {humanity} with a short timeline or list of key ideas.
    How might {audience} be introduced to {humanity}? Suggest an activity.
    What would a critic say against {humanity}, and how would a supporter reply?
    Extract all names, places and dates from this text as a list: "{name} left {town} on {2-28} {month} and reached {town2} on the first {day} after that, where {name2} was waiting with a/an {object}."
    Return JSON with the keys buyer, item, price and date: "On {2-28} {month}, {name} from {town} bought a/an {product} from {company} for {20-300} euros."
    Sort these ratings from best to worst and name the author of each: "{name} gave the {dish} {1-4} stars, {name2} was thrilled and gave it 5, and {name3} thought that a half star was generous."
    Say for each review whether it is positive, negative or mixed. 1) "The {product} broke in a week." 2) "I use my {product2} every day and love it." 3) "Fine {dish}, slow service."
    Turn these notes into a table: {name}, {job}, {town}, {22-64} years; {name2}, {job2}, {town2}, {22-64} years; {name3}, {job3}, {town3}, {22-64} years.
    Find the action items in this message: "Hi {name}, thanks for {day}. Please send the {event} budget to {name2} by {day2}, and could someone return the {object}? I'll call {company} myself."
    Write a text message that cancels an afternoon of {hobby} with {name}, without hurting any feelings.
    Rewrite this so that it sounds more {tone}: "{name} came to the {event} late and forgot the {object}."
    Correct the grammar and explain each change: "Me and {name} has went to the {building} on {day}, but it were close."
    Invent a holiday that celebrates {hobby}. Give it a name, a date, two customs and a traditional dish.
    What would you put into a time capsule about {topic} for people who open it in {50-300} years?
    Write a {tone} toast for {name}, a {job} who is retiring after {20-45} years in {town}.
    Give me a word-association chain of ten words that starts at "{object}" and ends at "{animal}".
    What questions should I ask before buying a second-hand {product}?
""")

CONVERSATION_SUFFIX = lines("""
    Keep it short.
    Please stay under 120 words.
    Use simple words.
    Add a surprising detail.
    Give an example.
    Write for {audience}.
    End with a question.
    Avoid clichés.
    Use bullet points where they help.
    Don't use any lists.
    The tone should be {tone}.
    Finish with a one-line summary.
""")

CONVERSATION_HAND = lines("""
    My daughter wants to know why the sky is dark at night if there are stars in every direction. What do I tell her?
    Write a breakup letter from a left sock to the right sock.
    I have twenty minutes, one egg, half an onion and some old rice. What can I cook?
    Name three things that people in the year 1900 got right about the future, and three they got wrong.
    Write a polite but firm reply to a customer who demands a refund two years after buying a lawnmower.
    A farmer has a wolf, a goat and a cabbage, and a boat that carries only one of them. How does the farmer bring them all across?
    Pretend you're the last dinosaur and keep a diary. Write the entry for today.
    Which would you rather have as a neighbour, a drummer or a rooster? Argue your case.
    I start at a new school tomorrow and I don't know anyone. Cheer me up.
    Tell the story of the three little pigs from the point of view of a building inspector.
    What makes a good apology? Give one bad example and one good one.
    Write a tongue-twister about a shy walrus.
    Help me name my small bakery. It is next to a canal and known for rye bread.
    Can a person be brave without being afraid? Discuss in two short paragraphs.
    Describe the colour green to someone who has never been able to see.
    Why do we remember embarrassing moments so well, and how can I stop thinking about one?
    Write a conversation between the Sun and the Moon about who works harder.
    Suppose that it's 1969 and you report live from mission control. Describe the minute before the landing.
    What are some respectful ways to disagree with your boss in a meeting?
    Draft a lost-and-found notice for a trumpet left on a bus.
    Which five books or stories would you take to a desert island, and why?
    You are a detective. There is flour on the floor, an open window and a missing cake. Present your theory.
    I promised to sing at my best friend's wedding, but I have lost my voice. Help me to find a way out that still makes her happy.
    Make a packing list for a week of camping with two small children in rainy weather.
    How do noise-cancelling headphones work? I'm a musician, so you may talk about waves.
    If the minute hand of my watch fell off, could I still tell the time roughly? How?
    Write a six-word story, then explain what it leaves out.
    Compose a weather forecast for a planet where it rains tea.
    How did people keep food fresh before there were fridges?
    Explain the offside rule with salt and pepper shakers on a table.
""")

# ---------------------------------------------------------------- translation

TO_FOREIGN = lines("""
    Translate into {language}: {quoted}
    Translate the following text into {language}.\\n\\n{text}
    Please translate this into {language}:\\n{text}
    How do you say this in {language}? {quoted}
    Write this in {language}, in a polite register: {quoted}
    English: {text}\\n{language}:
    Source (English): {text}\\nTarget: {language}. Give only the translation.
    I'm writing to a friend in {language}. Translate for me: {quoted}
    Translate from English to {language} and keep all names and numbers unchanged: {text}
    Give a natural {language} translation of the text between the lines.\\n---\\n{text}\\n---
    Could you put this into {language} for me? {text}
    {text}\\n\\nTranslate the text above into {language}.
    {quoted} - what is that in {language}?
    Translate to {language}, then list three of the words with their meanings: {quoted}
    You are a translator. Render this in {language}: {text}
    Provide both a {language} and a {language2} translation: {quoted}
    My {language} homework is to translate this. Show me how: {text}
    Translate into simple {language} that a learner can read: {text}
    EN -> {language}: {text}
    For a leaflet, translate this English text into {language}. Don't add anything.\\n{text}
""")

TO_ENGLISH = lines("""
    Translate into English: {quoted}
    Translate this {source} text into English.\\n\\n{text}
    What does this {source} text mean in English? {quoted}
    {source}: {text}\\nEnglish:
    Please give me an English translation of this message: {text}
    I don't speak {source}. What is this person saying? {quoted}
    {text}\\n\\nTranslate the {source} text above into English.
    Translate from {source} to English, keeping names and numbers: {text}
    Give a natural English version of: {quoted}
    Render into plain English: {text}
    Translate the text into English and name one difficult word: {quoted}
    I got this note in {source}. Tell me in English what it says: {text}
""")

ENGLISH_TEXTS = lines("""
    The train from {town} to {town2} leaves at {hour} o'clock, but on {day} it runs an hour later.
    {name} bought a/an {object} at the market and gave it to {name2} as a birthday present.
    We are sorry to tell you that the {building} will be closed from {day} until the end of {month}.
    My brother works as a {job} in {town} and comes home only once a month.
    Could you tell me where the {building} is? I have been walking in circles for {10-50} minutes.
    In {season}, the streets of {town} are full of tourists who come for the {event}.
    The {animal} is one of my favourite animals because it is both clever and patient.
    I would like to order the {dish}, but without onions, please. And a glass of water for my daughter.
    She has lived in {country} for {3-30} years and still misses the food of her childhood.
    If it rains on {day}, the {event} will take place inside the {building}.
    The doctor told {name} to rest for {2-9} days and to drink plenty of water.
    Dear {name}, thank you for your letter. I was very happy to read that you have found work as a {job}.
    There is a {color} door at the end of the corridor. Please knock before you enter.
    The company {company} has sold {100-900} thousand units of its new {product} since {month}.
    Yesterday I forgot my keys at the {building}, so I had to wait for {name} in front of the house.
    Scientists know a great deal about {science}, but many questions are still open.
    Nobody expected that the small team from {town} would win the cup after losing {3-9} games in a row.
    When I was a child, my grandmother used to make {dish} every {day}.
    To reach the old mill, follow the river for {2-9} kilometres and then turn left at the bridge.
    Would you rather try {hobby} with me or stay at home and read?
    The museum shows how {invention} changed the way people lived and worked.
    {name} opened the suitcase and found nothing but a/an {object} and a letter addressed to {name2}.
    Our flight was delayed by {2-9} hours, and no one at the airport could tell us why.
    The rent is {400-990} euros a month, and heating is included. The flat is free from {month}.
    Please switch off the lights when you leave, and put the {object} back where you found it.
    He said that he would call on {day}, but the telephone never rang.
    According to a new study, people who enjoy {hobby} sleep better and feel less lonely.
    I am looking for a present for a friend who is a {job}. She likes {hobby} and bright colours.
    The price of {food} has risen by {5-40} percent because the harvest was poor.
    Wash the vegetables, cut them into small pieces and cook them for {10-40} minutes over a low flame.
    The meeting on {day} has been moved to {hour} o'clock. Please bring the figures for {month}.
    Although he was tired, the {job} walked all the way to {town} to return the {object}.
    Have you ever seen a {animal} in the wild? I did once, near {town}, and I will never forget it.
    This ticket is valid for {2-9} days. Children under {5-14} travel free of charge.
    Life in {town} is quiet: in the morning the bakery opens, and in the evening the bells ring.
    The windows were open, and from the street came the sound of a violin. {name} stopped working and listened.
    The bridge was built in {1750-1980} and has been repaired {2-7} times since then.
    I agree with you about {topic}, but I think that we need more time to decide.
    Do not use the {product} near water. Keep it away from children, and unplug it before cleaning.
    After the storm, the neighbours helped one another to repair the roofs. By {day}, the whole village had light again.
    Many historians have written about {humanity}, yet few of them agree on its causes.
    {name} and {name2} met in {place}. Two years later they opened a small restaurant in {town}.
    I have read your report on {topic} with great interest. There are only two points that I would change.
    Because the lift was out of order, the {job} had to carry the {object} up to the ninth floor.
    The sea was calm, the sky was clear, and the fishermen sang as they mended their nets.
    She smiled, put on her coat and said that she would be back before the coffee was cold.
    What surprised me most in {country} was how friendly the people were to a stranger with a bad accent.
    Excuse me, is this seat free? My friend {name} and I have reservations for numbers {10-40} and {41-80}.
    The children built a house out of cardboard, painted it {color} and sold lemonade from its window.
    It is not true that {food} is always bad for you; as with most things, the amount matters.
""")

GERMAN_TEXTS = lines("""
    Der Zug nach {town} hat {5-55} Minuten Verspätung, weil ein Baum auf den Gleisen liegt.
    {woman} hat gestern ihre Schlüssel verloren und musste bei {name2} übernachten.
    Könnten Sie mir bitte sagen, wie ich am schnellsten zum Bahnhof komme?
    Liebe {woman}, vielen Dank für deine Einladung. Leider kann ich am Samstag nicht kommen, weil ich arbeiten muss.
    Die Wohnung liegt im dritten Stock, hat {2-5} Zimmer und kostet {500-990} Euro im Monat.
    Wenn es morgen regnet, bleiben wir zu Hause und backen einen Kuchen.
    Im Sommer fahren viele Familien ans Meer, aber {name} bleibt lieber in den Bergen.
    Das Museum ist montags geschlossen. An allen anderen Tagen öffnet es um {8-11} Uhr.
    Nach {10-40} Jahren in {town} kehrte der alte Lehrer in sein Heimatdorf zurück.
    Bitte nehmen Sie die Tabletten zweimal am Tag nach dem Essen und trinken Sie viel Wasser.
    Wir haben uns auf einer Reise nach {town} kennengelernt und schreiben uns seitdem jede Woche.
    Der Hund meiner Nachbarin bellt jede Nacht, doch niemand wagt es, mit ihr darüber zu sprechen.
    {woman} möchte Ärztin werden, deshalb lernt sie jeden Abend bis {9-11} Uhr.
    Die Brücke wurde im Jahr {1750-1960} gebaut und im Krieg zerstört.
    Ich hätte gern ein Kilo Kartoffeln, {2-9} Äpfel und ein halbes Brot.
    Obwohl das Konzert ausverkauft war, bekam {name} noch eine Karte für den letzten Platz.
    Am Ende der Straße steht ein kleines Haus mit einem Garten voller Rosen.
    Die Sitzung mit {name} wurde auf Donnerstag verschoben, da {2-6} Kollegen krank sind.
    Er öffnete den Brief, las ihn zweimal und legte ihn schweigend auf den Tisch.
    Mein Großvater erzählte uns oft, wie er als Kind mit dem Schlitten zur Schule fuhr.
    Das Paket für {name} ist am Freitag angekommen, aber der Inhalt war beschädigt.
    Wegen der Baustelle fährt die Linie {2-80} bis Ende Mai nicht durch die Innenstadt.
""")

FRENCH_TEXTS = lines("""
    Le train pour {town} aura {5-55} minutes de retard à cause de la neige.
    {woman} a oublié son parapluie dans le bus et elle est rentrée toute mouillée.
    Pourriez-vous m'indiquer la pharmacie la plus proche, s'il vous plaît ?
    Chère {woman}, merci pour ta carte. Nous serons très heureux de te revoir au printemps.
    L'appartement se trouve au {2-9}e étage, sans ascenseur, mais la vue est magnifique.
    S'il fait beau dimanche, nous irons pique-niquer au bord du lac avec {name}.
    Le musée est fermé le mardi. L'entrée coûte {6-18} euros et elle est gratuite pour les enfants.
    Après {10-40} ans de travail à {town}, mon oncle a décidé d'ouvrir une petite librairie.
    Je voudrais une baguette, {2-9} croissants et un morceau de fromage, s'il vous plaît.
    Mon voisin joue du piano tous les soirs et, à vrai dire, il joue très bien.
    {name} et {name2} se sont mariés en {1960-2020} dans un village du sud.
    La réunion commencera à {8-11} heures. Merci d'apporter vos documents.
    Il a ouvert la fenêtre, regardé la mer et décidé de ne plus jamais partir.
    Les enfants ont trouvé un chat dans le jardin et l'ont appelé {name}.
    Comme le restaurant était complet, nous avons mangé des crêpes dans la rue.
    La vieille horloge de {town} sonne toujours {2-9} minutes trop tôt.
    Quand j'étais petite, ma grand-mère me racontait des histoires avant de dormir.
    Le médecin a conseillé à {name} de marcher {20-60} minutes par jour.
    Nous cherchons une personne sérieuse qui parle deux langues et qui aime le contact avec les clients.
    Malgré la pluie, plus de {200-900} personnes sont venues écouter la chorale.
    Votre colis a été livré chez {name}, au numéro {2-99} de la même rue.
    Il faut arroser cette plante {2-4} fois par semaine et la garder loin du soleil direct.
""")

SPANISH_TEXTS = lines("""
    El tren a {town} sale a las {6-11} de la mañana desde el andén {2-9}.
    {name} perdió su cartera en el mercado, pero un niño se la devolvió.
    ¿Podría decirme dónde está la parada de autobús más cercana?
    Querida {woman}: gracias por el libro que me enviaste. Lo leí en dos noches.
    El piso tiene {2-5} habitaciones, una cocina grande y un balcón con vistas al parque.
    Si mañana hace buen tiempo, {name} y yo iremos a la playa en bicicleta.
    El museo cierra los lunes y la entrada cuesta {4-15} euros.
    Después de {10-40} años en {town}, mi abuelo volvió a su pueblo para plantar olivos.
    Quisiera un kilo de tomates, {2-9} limones y un poco de perejil.
    Mi vecina canta todas las mañanas mientras riega las plantas.
    {woman} quiere ser ingeniera y estudia {2-6} horas cada noche.
    La reunión con {name} se ha aplazado hasta el jueves porque falta un informe.
    El niño abrió la caja despacio y encontró una carta sin firma.
    Aunque llovía mucho, más de {200-900} personas esperaron para ver el desfile.
    El puente fue construido en {1750-1960} y todavía lo cruzan los pastores con sus ovejas.
    Por favor, apague las luces antes de salir y cierre la puerta con llave.
    Cuando era joven, mi tía {woman} viajó sola por todo el continente.
    El médico le dijo a {name} que descansara {2-9} días y bebiera mucha agua.
    No encontramos mesa en el restaurante, así que comimos bocadillos en la plaza.
    El pueblo de {name} celebra su fiesta en agosto con música, fuegos artificiales y una gran comida.
    Su pedido número {1000-9999} llegará el viernes por la tarde.
    Hace {2-9} años que no veo a mi amigo {name}, pero hablamos por teléfono cada semana.
""")

SOURCE_TEXTS = {"German": GERMAN_TEXTS, "French": FRENCH_TEXTS, "Spanish": SPANISH_TEXTS}

TRANSLATION_HAND = lines("""
    What is the French word for "dragonfly", and how would you use it in a sentence?
    Give the Italian for the days of the week and the four seasons.
    Translate the saying "Better late than never" into Spanish, French and German.
    How do I politely say in German that I have already eaten?
    Translate this menu into English: Zwiebelsuppe, Schweinebraten mit Knödeln, grüner Salat, Apfelstrudel.
    Traduis en anglais : « Il vaut mieux être seul que mal accompagné. »
    Traduce al inglés: «A caballo regalado no le mires el diente.»
    Übersetze ins Englische: „Morgenstund hat Gold im Mund.“
    Translate into French, once for a friend and once for a stranger: "Where are you going, and may I come with you?"
    What is the difference between the Spanish verbs "ser" and "estar"? Translate one example of each into English.
    I want to write "Happy anniversary, my dear parents" on a cake in Portuguese. What should I write?
    Put this warning sign into Italian: "Beware of falling rocks. No stopping for the next two kilometres."
    Which English words match the German words "Schadenfreude", "Fernweh" and "Feierabend" best?
    Translate the numbers from eleven to twenty into French.
    Please turn this voice message into written Dutch: "Hi, it's me. I missed the bus, so start without me and keep a slice of pizza warm."
    Translate into Spanish for a hotel lobby: "Breakfast begins at seven. Please leave wet boots by the door."
    Translate this line of verse into German and try to keep a rhyme: "The night is long, the road is wide, but you are walking at my side."
    How would an Italian order two coffees, one glass of still water and the bill? Give the Italian sentences with English below.
    Is "I am cold" in French built with "être" or "avoir"? Translate it together with "I am hungry" and "I am tired".
    Translate into English and explain the pun, if there is one: "Warum können Geister so schlecht lügen? Weil man durch sie hindurchsehen kann."
""")

# ---------------------------------------------------------------- passages

# Each scenario is a list of sentences. The first is always used; of the others one or two may be left out.
SCENARIOS = [
    lines(block)
    for block in """
The council of {town} voted on {day} to renovate the {building}, which has stood empty since {1985-2015}.
The work will cost about {2-9} million euros and should be finished within {2-4} years.
Councillor {name} said that the plan would bring life back to the centre.
Shop owners fear that the building site will keep customers away.
A citizens' group led by {name2} had collected {900-4000} signatures in favour of the project.
The first workers are expected to arrive in {month}.
===
A {large_animal} escaped from a wildlife park near {town} early on {day}, after a keeper had left a gate open.
It wandered along the main road and stopped in front of the {building}, where children fed it biscuits.
Police closed the street for {2-5} hours.
{name}, a retired {job}, finally lured the animal into a trailer with a bucket of fruit.
Nobody was hurt, and the park has promised to fit new locks.
Visitors can see the runaway again from {day2}.
===
Hi team, a few points after our call on {day}. The launch of the new {product} has been moved to {month} because two parts arrived late.
{name} will talk to the supplier and report back before the weekend.
{name2} is going to rewrite the manual, which customers found confusing.
We still need someone to plan the stand at the {event} in {town}.
Please don't promise any discounts until the new prices have been approved.
Thanks for your patience, and well done on last quarter's results.
===
I bought this {product} from {company} {2-9} months ago and have used it almost every day since then.
It is light, well made and easy to clean, and the {color} finish looks better than in the pictures.
The instructions, on the other hand, are printed so small that my father could not read them.
After about {4-9} weeks a screw came loose, but customer service sent a new one within two days.
At {30-190} euros it isn't cheap.
All in all I would buy it again, though I would wait for a sale.
===
Researchers at a university in {country} asked {200-900} adults to take up {hobby} for three months.
At the start and at the end, the volunteers answered questions about sleep, mood and stress.
Those who practised at least twice a week reported better sleep and fewer worries.
People who did it in a group gained more than those who did it alone.
The authors warn that the volunteers were already fairly healthy and wanted the plan to work.
A larger study is planned for next {season}.
===
To make {dish} for {4-8} people, begin by getting all the ingredients ready, since the last steps go quickly.
Chop the onions and fry them slowly in a little oil until they are soft.
Many cooks add the salt too early, which makes the result watery.
Let everything rest for {10-30} minutes before serving.
{name}, who runs a small restaurant in {town}, adds lemon juice at the very end.
Leftovers keep for two days in the fridge and taste even better when they are warmed up.
===
When {name} became a {job} in {town}, most people expected the young newcomer to give up within a year.
The pay was poor, the hours were long, and the roof of the workshop leaked.
But {name} learned every customer's name and never sent a bill before the work was done.
Word spread, and soon people came from as far away as {town2}.
Today the business employs {4-20} people.
A sign above the door still says that advice is free.
===
The {event} in {town} drew a record crowd of {3-9} thousand visitors this year.
The sun shone on both days, and the new stage beside the {building} was praised by musicians and guests alike.
There were complaints about the long queues for food.
Some visitors waited more than {40-80} minutes for a plate of {dish}.
The organisers, led by {name}, want to invite twice as many food stalls next time.
Part of the profit will go to the local {building2}.
===
The {company} company has announced that it will close its factory in {town} at the end of {month}.
About {120-900} people work there, many of them for more than twenty years.
The management blames falling demand for its {product} and high energy prices.
The union says that the figures are misleading and that the plant made a profit last year.
The mayor, {name}, has offered to mediate between the two sides.
Talks are to begin on {day}.
===
Last {season} I spent {3-8} weeks walking from {town} to {town2} with nothing but a small tent and a/an {object} that had belonged to my grandfather.
For the first days my feet hurt so much that I thought of turning back.
Then a {job} named {name} showed me how to tie my boots properly, and everything changed.
I slept in barns, beside rivers and once on the floor of a {building}.
People were kinder than I had expected.
I came home thinner, browner and far less afraid of strangers.
===
Dear residents, from {day} the water supply in the northern part of {town} will be switched off between {7-10} a.m. and noon.
The old pipes below the {building} have to be replaced before the winter.
Please fill a few bottles on the evening before.
If the water looks brown afterwards, let it run for {3-9} minutes.
People who need help may call {name} at the water office.
The work should take no longer than {2-6} days.
===
The team from {town} beat its rivals from {town2} by {3-6} goals to two in front of {2-9} thousand spectators.
For the first half hour, the visitors were clearly the better side and hit the post twice.
After the break, coach {name} brought on two young players, and the game turned round.
{name2}, who is only seventeen, scored three times.
The visiting coach complained about a penalty that was not given.
With this win the team moves up to {4-9}th place.
===
In a quiet corner of {country}, villagers have begun to protect the {large_animal}, which their parents used to chase away.
Visitors now pay for guided walks, and the money is shared among all the families.
{name}, once a hunter, works as a guide and knows each animal by its marks.
Numbers have grown from {10-30} to more than {60-95} within a decade.
Not everyone is pleased, since some fields have been damaged.
A fund now pays for lost crops.
===
A/An {object} found in an attic in {town} has been sold at auction for {4-90} thousand euros.
The owner, {name}, had nearly thrown it away while clearing the house.
An expert recognised a mark that was used by only one workshop in the {17-19}th century.
Three bidders fought over the piece by telephone for {10-25} minutes.
The buyer has chosen to remain unknown.
{name} wants to spend the money on a new roof and a long holiday in {country}.
===
Starting next {month}, pupils at a school in {town} will begin their lessons an hour later.
Doctors had argued for years that teenagers need more sleep than they get.
A trial with {2-6} classes showed better marks and far fewer absences.
Parents who start work early are worried about who will look after the younger children.
The head teacher, {name}, has promised a breakfast club in the {building}.
After a year, the school will vote on whether to keep the new hours.
===
Many people believe that {food} is hard to make at home, but all it takes is patience and a clean kitchen.
{name} has been teaching the method to beginners in {town} for {5-25} years.
The most common mistake, the teacher says, is to hurry.
A cheap thermometer is more useful than any expensive machine.
The first attempt rarely succeeds, and the third one nearly always does.
The next course begins in {month} and costs {20-90} euros.
===
The new night bus between {town} and {town2} has been running for {3-11} months, and the first figures are now known.
On weekdays it carries about {20-60} passengers, most of them nurses and kitchen staff.
At weekends it's so full that a second bus is needed.
Drivers have asked for better lighting at the stop near the {building}.
Taxi owners say that they have lost a third of their trade.
The council will decide in {month} whether the service goes on.
===
Dear {name}, I'm writing about the flat on Mill Street, which we visited on {day}.
We liked the bright kitchen and the short walk to the {building}.
However, the window in the small bedroom doesn't close, and there is a damp patch under the sink.
If both are repaired before {month}, we would be glad to sign for two years.
We also hoped that the rent could be lowered by {20-90} euros.
Please let us know by {day2}. Best wishes, {name2}
===
The {shy_animal} has a reputation for being shy, yet in {town} it has become a common sight.
Biologists think that it is drawn by warm cellars and by food that is left outside.
A survey by {name} counted {30-95} animals within the city limits.
Most residents enjoy the visitors and share photographs of them.
Gardeners are less happy about the holes in their lawns.
The city advises people to close their bins and not to feed the animals.
===
It was nearly dark when {name} noticed that the {object} was gone.
The shop had been busy all day, and anyone could have put it under a coat.
{name2} remembered a customer with a {color} hat who had asked strange questions.
They searched the {building} next door and found nothing.
The next morning, the {object} stood on the doorstep with a note that said only "Sorry, and thank you".
They never learned who had borrowed it.
===
A debate about {topic} has divided the people of {town} for months.
Supporters point out that other towns have had good results and that young families want change.
Opponents say that the costs are too high and that no one asked the older residents.
At a public meeting on {day}, {name} proposed a trial of {3-9} months.
Both sides agreed, though neither of them seemed happy.
The results are to be published in {month}.
===
Volunteers from {town} spent {day} collecting rubbish along the river and filled {40-190} bags.
Among the strangest finds were a/an {object}, a wedding ring and a complete set of garden furniture.
The ring was returned to its owner, {name}, who had lost it {5-30} years earlier.
The group meets every month and welcomes new members.
Its founder, a {job}, says that the river is already much cleaner than before.
The next meeting will be held near the {building}.
===
The first attempt to bring {hobby} to the prison in {town} was met with laughter.
Ten years later the course has a waiting list of {20-80} names.
The teacher, {name}, says that nobody asks the students what they have done.
A study found that those who take part are less likely to commit new crimes.
Critics think that the money should go to the victims instead.
In {month} the students will present their work to the public.
===
The island off {town} has only {40-300} inhabitants and no doctor, so help used to be hours away.
Since {month}, a small aircraft without a pilot has carried medicine across the water.
The flight takes {8-25} minutes, even when the sea is too rough for boats.
{name}, the island's only nurse, says that it has already saved two lives.
Strong wind remains a problem.
If the trial succeeds, other islands will get the same service.
===
For {woman}, the day begins at {hour} with a cup of tea and a look at the sky.
As a {job} in {town}, she works outdoors in every season.
She took over the business from an aunt and had to learn the accounts from library books.
Large competitors offer lower prices, but they can't match her advice.
Her son would rather become a {job2}.
She doesn't mind, as long as someone keeps the sign above the door painted {color}.
===
Heavy snow cut off {town} from the outside world for {2-6} days last week.
The main road was blocked by fallen trees, and the power failed in {200-900} homes.
Neighbours cooked {dish} on camping stoves and shared it in the {building}.
A helicopter brought medicine for {name}, who is {78-96} years old.
The mayor thanked the volunteers and asked for a second snow plough.
Forecasters expect milder weather from {day}.
===
The new exhibition in the art gallery of {town} is devoted to a single thing: the {object}.
More than {60-190} examples from {country} and elsewhere are on show, some of them over a century old.
The curator, {name}, began to collect them as a child.
Visitors may touch a few of the pieces, which makes the show popular with school classes.
The catalogue is beautiful but far too heavy to carry around.
The exhibition closes at the end of {month}.
===
Dear customers, the price of our {food} will rise by {4-18} percent from the first of {month}.
Two poor harvests in {country} have made the raw materials scarce, and transport costs more than it did a year ago.
We have put off this step for as long as we could.
Orders that reach us before then will be sent at the old price.
Members of our club keep their discount.
Thank you for your loyalty, {name}, {company}
===
My first lesson in {hobby} was a disaster from start to finish.
I came to the wrong {building} and was {15-50} minutes late, and I had left my glasses at home.
The teacher, {name}, laughed and gave me the easiest task of all.
I failed at it {4-9} times in a row.
Then, without any warning, it worked, and the whole group clapped.
I have gone back every {day} since then.
===
The tram line through the centre of {town} will be extended to the {building} by {2027-2035}.
Passengers will save about {6-20} minutes on each trip.
To make room for the tracks, {40-190} parking spaces will disappear.
The chamber of trade fears for its members, while doctors at the hospital welcome quieter streets.
{name}, the chief engineer, says that the worst of the noise will be over in {month}.
===
Notes from the parents' meeting on {day}: the class trip will go to {town}, not to {town2} as planned.
The cost for each child is {40-180} euros, to be paid by {day2}.
{name} is looking for two adults who can come along.
Children who can't swim should tell the teacher beforehand.
Phones stay at home.
The party in {month} will have {country} as its theme, and {name2} will bring {dish}.
===
For centuries, the wells of {town} gave all the water that its people needed.
Then a {company} factory opened nearby, and within {5-15} years the water had sunk by {2-9} metres.
{name}, a {job}, was the first to keep records.
The company says that a run of dry summers is to blame.
Geologists think that both explanations are partly right.
A court will hear the case in {month}.
===
A computer program has beaten three experienced doctors at reading pictures of {body}, according to a study from {country}.
It was trained on {20-90} thousand images and needed less than a minute for each new one.
However, it made strange mistakes when pictures came from another hospital.
The authors see it as a second opinion and not as a replacement.
Patients who were asked about it wanted a person to have the last word.
===
Our stay at the small hotel in {town} began badly, because the booking had been lost.
The owner, {name}, gave us the best room instead and brought up a plate of {dish}.
The beds were comfortable, and the view over the roofs was wonderful.
Light sleepers should know that the bells next door ring at {hour}.
We paid {60-180} euros a night.
We'd return, but next time we would phone ahead.
===
In {1900-1960} a {job} from {town} set out to cross {country} on foot with a donkey and a/an {object}.
Newspapers made fun of the plan, and friends bet that it would last a week.
After {3-9} months the traveller reached the coast, thin but in good spirits.
The diary of the trip lay forgotten in a drawer until {name} found it.
It has now been printed and reads like a novel.
===
To save energy, the {building} in {town} has lowered its heating to {16-18} degrees since {month}.
Some visitors now bring blankets, and others have stopped coming.
Staff were given warm jackets in {color}.
The first bill shows that costs have fallen by {10-35} percent.
{name}, who manages the house, hopes that new windows will bring the warmth back next {season}.
===
A small orchestra of retired people in {town} plays on instruments built from kitchen tools.
Its founder, {name}, once a {job}, began with a kettle and a garden hose.
Today {9-25} members meet every {day} in the {building}.
They do not read music and learn each tune by ear.
Requests for concerts come from as far away as {country}.
They accept no money, only {food} and cake.
===
Farmers around {town} have started to plant strips of wild flowers between their fields.
The strips attract insects that eat pests, so that less poison is needed.
In the first year the harvest of {fruit} fell slightly, but in the third it was {5-20} percent higher than before.
{name} was among the doubters and has since become the plan's loudest supporter.
The state pays for the seeds.
A guide for other regions will appear in {month}.
""".split("===")
]

# General facts: topic, passage, and questions that the passage answers.
FACTS = [
    tuple(row.split(" | "))
    for row in lines("""
    the Nile | The Nile flows north through eastern Africa and empties into the Mediterranean Sea. Its yearly flood once left rich mud on the fields, which made farming possible in the desert. | Why was the flood of the Nile useful to farmers? | Into which sea does the Nile flow?
    honey | Bees make honey from nectar, which they thicken by fanning it with their wings. Because it contains so little water, microbes cannot grow in it, and sealed honey keeps for years. | Why does honey keep so long? | How do bees thicken nectar?
    Mount Everest | Mount Everest stands on the border of Nepal and China. Edmund Hillary and Tenzing Norgay were the first people known to have reached its summit, in 1953. | Who first reached the summit of Mount Everest? | Between which countries does Mount Everest lie?
    octopuses | An octopus has three hearts and blue blood. Two of the hearts pump blood through the gills, and the third supplies the rest of the body. | What do an octopus's three hearts do? | What colour is an octopus's blood?
    the printing press | Johannes Gutenberg printed with movable metal type in Mainz around 1450. Books became cheaper, and ideas spread faster than scribes could ever have copied them. | Where did Gutenberg work? | How did the invention change books?
    camels | A camel's hump stores fat, not water. The animal can drink about a hundred litres in a short time, and it lets its body warm up by day so that it sweats less. | What is in a camel's hump? | How does the camel save water?
    the Eiffel Tower | The Eiffel Tower was built for the world's fair of 1889 in Paris. In hot weather the iron expands, and the tower grows by several centimetres. | Why was the Eiffel Tower built? | What happens to the Eiffel Tower in hot weather?
    penicillin | In 1928 Alexander Fleming noticed that a mould had killed the bacteria in one of his dishes. Others later turned his discovery into a medicine that could be made in large amounts. | What did Fleming notice? | Did Fleming turn the mould into a medicine by himself?
    coffee | The coffee plant comes from Ethiopia. Its fruit looks like a small cherry and usually holds two seeds, which are dried and roasted before they are ground. | Where does the coffee plant come from? | What are coffee beans, strictly speaking?
    the Moon | The Moon always turns nearly the same side towards the Earth, because it rotates once in the time it takes to go around us. Its gravity is the main cause of the tides. | Why do we see only one side of the Moon? | What is the main cause of tides?
    bamboo | Bamboo is a grass, though some kinds grow taller than a house. Certain species can grow most of a metre in a single day, and many flower only once in several decades. | Is bamboo a tree? | How often does bamboo flower?
    the Great Wall | The Great Wall of China is not one wall but many, built by different dynasties over some two thousand years. Much of what tourists visit today dates from the Ming period. | Is the Great Wall of China a single wall? | From which period is the part of the Great Wall that tourists see?
    chocolate | Chocolate is made from the beans of the cacao tree, which are fermented, dried and roasted. In ancient Mexico it was taken as a bitter drink, and the beans served as money. | How was chocolate first taken? | What other use did cacao beans have?
    whales | Whales are mammals that must come up to breathe. Some species sleep with only half of the brain at a time, so that they remember to rise to the surface. | How do some whales sleep? | Why must whales come to the surface?
    the metre | The metre was first defined in the 1790s as one ten-millionth of the distance from the North Pole to the equator. Since 1983 it has been defined through the speed of light. | How is the metre defined today? | What was the first definition of the metre?
    bread mould | Mould spores float in the air and settle on bread. They grow fastest in warm and damp places, so bread in a plastic bag often turns green before bread in a paper one. | Where does mould grow fastest? | Is a plastic or a paper bag better for bread, and why?
    the Sahara | The Sahara is the largest hot desert on Earth. Around six thousand years ago parts of it were green, with lakes and herds of cattle that people painted on rocks. | What did parts of the Sahara look like six thousand years ago? | How do we know that people once lived in the green Sahara?
    vaccination | In 1796 Edward Jenner showed that people who were infected with the mild disease cowpox were protected against smallpox. Smallpox was declared wiped out in 1980. | What did Jenner show? | When did smallpox disappear?
    bats | Most bats find their way by sending out high calls and listening to the echoes. They are the only mammals that can truly fly, and many plants rely on them for pollination. | How do bats find their way? | Why are bats useful to plants?
    glass | Glass is made by melting sand with soda and lime at a very high temperature. It can be melted and shaped again many times without losing its quality. | What is glass made of? | Can glass be recycled more than once?
    the Panama Canal | The Panama Canal, opened in 1914, links the Atlantic and the Pacific. Locks lift the ships to a lake about 26 metres above the sea and lower them again on the other side. | How do ships get across the Panama Canal? | When did the Panama Canal open?
    salt | In the past, salt was so precious that cities grew rich by trading it. It draws water out of meat and fish and so prevents them from spoiling. | How does salt preserve food? | Why did some cities grow rich?
    Marie Tharp | Marie Tharp drew maps of the ocean floor in the 1950s. Her charts showed a valley along the middle of the Atlantic, which supported the idea that continents move. | What did Marie Tharp's charts show? | Which idea did the valley in the Atlantic support?
    tea | Green and black tea come from the same plant. Black tea is fully oxidised after picking, while green tea is heated early so that its leaves stay green. | Do green and black tea come from different plants? | Why do green leaves stay green?
    owls | An owl can turn its head by about 270 degrees. Its eyes cannot move in their sockets, so it must turn the whole head to look aside. Soft feathers make its flight nearly silent. | Why must an owl turn its head? | What makes its flight silent?
    earthquakes | The Earth's crust is broken into plates that move a few centimetres a year. Where they catch on one another, stress builds up, and its sudden release is an earthquake. | What causes an earthquake? | How fast do the plates move?
    the Titanic | The Titanic sank in April 1912 after striking an iceberg. The ship carried too few lifeboats for all those on board, and many boats left half empty. | Why were there not enough places in the Titanic's boats? | When did the Titanic sink?
    rubber | Natural rubber comes from the milky sap of a tropical tree. Charles Goodyear found that heating it with sulphur makes it tough and elastic in both heat and cold. | What did Goodyear find? | Where does rubber come from?
    Venice | Venice is built on wooden piles driven into the mud of a lagoon. Without air, the wood under water hardly rots. High tides still flood the main square. | Why does the wood under Venice not rot? | What still floods the main square of Venice?
    penguins | Emperor penguins breed in the Antarctic winter. The male keeps the egg on his feet for about two months without eating, while the female hunts at sea. | Who keeps the emperor penguin's egg warm? | What does the female penguin do while the egg is kept warm?
    the compass | Chinese sailors used magnetic needles for navigation about a thousand years ago. The needle points to the magnetic pole, which lies some distance from the true pole and slowly moves. | Where does a compass needle point? | Who used magnetic needles early on?
    potatoes | Potatoes were first grown in the Andes, where farmers raised hundreds of kinds. In Europe they were at first distrusted and later became a main food of the poor. | Where were potatoes first grown? | How did Europeans receive the potato?
    lightning | Lightning heats the air to a higher temperature than the surface of the Sun. The air expands so fast that we hear thunder, about three seconds later for each kilometre of distance. | What causes thunder? | How can one estimate the distance of lightning?
    the Colosseum | The Colosseum in Rome was finished around the year 80 and held some fifty thousand people. Much of its stone was later carried away for other buildings. | How many people did the Colosseum hold? | Why is part of the Colosseum missing?
    ants | Ants leave scent trails that lead others to food. The more ants use a trail, the stronger it smells, so that the shortest path soon wins. | How does the shortest path win? | How do ants show the way?
    the Dutch polders | About a quarter of the Netherlands lies below sea level. Windmills once pumped water from the low fields, and electric pumps do so today. | What pumps the water out of Dutch fields today? | How much of the Netherlands lies below sea level?
    Saturn | Saturn's rings consist mostly of ice, in pieces that range from dust to the size of houses. The planet is so light for its size that its average density is lower than that of water. | What are the rings of Saturn made of? | What is unusual about the density of the planet?
    cats | A cat's whiskers are about as wide as its body, which helps it to judge gaps in the dark. Cats sleep for much of the day because hunting takes short bursts of energy. | What are whiskers good for? | Why do cats sleep so much?
    silk | Silk comes from the cocoon of a moth, and one cocoon can give several hundred metres of thread. For centuries China kept the method secret. | How long is the thread of one silk cocoon? | Who kept the method of making silk secret?
    the heart | The human heart beats about a hundred thousand times a day. The right side sends blood to the lungs, and the left side sends it to the rest of the body. | What does each side of the heart do? | How often does the heart beat in a day?
    the Amazon | The Amazon carries more water than any other river. Its rainforest makes part of its own rain, since the trees give off great amounts of water vapour. | How does the Amazon rainforest make rain? | What is special about the Amazon river?
    concrete | Roman concrete contained volcanic ash and has lasted two thousand years in sea water. Modern concrete is strengthened with steel, which rusts when water gets in. | What did Roman concrete contain? | What is the weak point of modern concrete?
    hibernation | A hibernating dormouse lowers its body temperature to a few degrees above freezing and breathes only rarely. It lives on the fat that it stored in autumn. | What does a hibernating dormouse live on? | How does a dormouse's body change in hibernation?
    the Olympics | The first modern Olympic Games were held in Athens in 1896 with athletes from about fourteen countries. Winners received silver medals, not gold ones. | What did winners receive? | Where were the first modern games held?
    the Great Barrier Reef | The Great Barrier Reef lies off the coast of Australia and consists of thousands of smaller reefs. When the water is too warm, corals expel their algae and turn white. | Why do corals turn white? | Is the Great Barrier Reef a single reef?
    pencils | The core of a pencil is a mixture of graphite and clay, not lead. More clay makes it harder and paler. | Is there lead in a pencil? | What makes a pencil hard?
    the wolf in Yellowstone | Wolves were brought back to Yellowstone in 1995, after seventy years without them. Elk became more careful, and young willows could grow again in some valleys. | When did wolves return? | How did the elk respond?
    Braille | Louis Braille was fifteen when he devised a script of raised dots in 1824. Each sign has up to six dots, which a fingertip can feel at once. | How old was Braille? | How many dots can a sign have?
    icebergs | About nine tenths of an iceberg lie under water. The ice is frozen fresh water that broke off a glacier, so it contains hardly any salt. | Is an iceberg salty? | How much of an iceberg is under water?
    the tulip craze | In the 1630s the price of rare tulip bulbs in the Netherlands rose until a bulb could cost as much as a house. In February 1637 buyers stayed away and prices collapsed. | What ended the craze? | How expensive was a rare tulip bulb?
""")
]

SUMMARY_INSTRUCTIONS = lines("""
    Summarize the following text in {one_to_three}.
    Summarize this in your own words.
    Write a one-sentence summary of the text below.
    What are the main points of this text? Use bullet points.
    Give me a short summary for {audience}.
    Sum up the text in no more than {25-50} words.
    Condense this passage to its most important facts.
    Write a headline and a one-line summary.
    In plain language, what happened here?
    Shorten the text to about a third of its length.
    Who is involved, and what is it about? Answer in {one_to_three}.
    Make three bullet points from this text.
    Summarize the text as a short message to a colleague.
    Read the passage and state its main idea, followed by two supporting details.
    Please write a {tone} summary of this text.
    Give a brief summary and leave out all the numbers.
    Summarize the text below and mention any open question.
    Write an abstract of two sentences.
    What should I remember from this?
    Summarize the passage, first in one sentence and then in five words.
    Turn this into a short radio news item.
    Briefly retell the following.
""")
ONE_TO_THREE = ["one sentence", "two sentences", "three sentences"]

SUMMARY_LAYOUTS = lines("""
    {instruction}\\n\\n{passage}
    {instruction}\\n{passage}
    {passage}\\n\\n{instruction}
    Text: {passage}\\n\\nTask: {instruction}
    {instruction}\\n\\n"{passage}"
    Here is a text.\\n\\n{passage}\\n\\n{instruction}
    {instruction}\\n\\n### Text\\n{passage}
    {passage}\\n\\n{instruction} Summary:
""")

RAG_LAYOUTS = lines("""
    Answer the question using only the passages below.\\n\\n{passages}\\n\\nQuestion: {question}
    {passages}\\n\\nBased on the passages, answer this: {question}
    Context:\\n{passages}\\n\\nQuestion: {question}\\nAnswer:
    You are given search results. Use them to answer the user, and cite the number of the passage.\\n\\n{passages}\\n\\nUser: {question}
    Question: {question}\\n\\nRetrieved passages:\\n{passages}\\n\\nGive a short answer.
    Read the documents and answer in one or two sentences. If the answer is not in them, say so.\\n\\n{passages}\\n\\n{question}
    {question} Here is what I found:\\n\\n{passages}\\n\\nPlease answer and tell me which passage you used.
    Use the notes below to answer. Do not use outside knowledge.\\n\\n{passages}\\n\\nQ: {question}\\nA:
    Documents:\\n{passages}\\n\\nWrite a helpful reply to this question: {question}
    Some of these passages are not relevant. Pick the right one and answer.\\n\\n{passages}\\n\\nQuestion: {question}
    The knowledge base returned these entries:\\n{passages}\\n\\nA customer asks: "{question}" How should we answer?
    Answer with a full sentence and a supporting quotation.\\n\\n{passages}\\n\\n{question}
""")

PASSAGE_MARKS = ["[{n}] ", "Passage {n}: ", "({n}) ", "Document {n}: ", "{n}. ", "- "]

# Made-up records for questions that only the context can answer: passage, question, question.
RECORDS = [
    tuple(row.split(" | "))
    for row in lines("""
    The {building} in {town} is open from {7-11} a.m. until {5-9} p.m. It is closed on {day}s and throughout {month}. | When is the {building} in {town} closed? | Could I visit the {building} in {town} on a {day}?
    {company} gives a guarantee of {2-9} years on each {product}. The guarantee does not cover damage by water. | How long is the guarantee of {company} on a {product}? | My {product} from {company} got wet and broke. Is that covered?
    {name} joined {company} as a {job} in {1990-2020} and now leads the office in {town}. | Who leads the office of {company} in {town}? | What was the first post that {name} held at {company}?
    The ferry from {town} to {town2} takes {30-95} minutes and runs {2-8} times a day in {season}. Bicycles travel free. | How long is the ferry trip from {town} to {town2}? | What does it cost to take a bicycle on the ferry to {town2}?
    The {event} in {town} takes place on the first {day} of {month}. If it rains, it moves into the {building}. | Where is the {event} in {town} held if it rains? | When does the {event} in {town} take place?
    Employees of {company} have {24-32} days of holiday. Requests must be sent to {name} at least {2-6} weeks ahead. | To whom do employees of {company} send holiday requests? | How much holiday do employees of {company} have?
    The recipe for {dish} by {name} serves {4-9} people and needs {30-90} minutes. It contains nuts. | Is the {dish} by {name} safe for someone with a nut allergy? | How many people does the {dish} by {name} serve?
    The bridge at {town} was opened in {1850-1990} and is {120-900} metres long. Lorries have been banned from it since {1995-2020}. | Since when have lorries been banned from the bridge at {town}? | How long is the bridge at {town}?
    To reset the {product} made by {company}, hold the {color} button for {5-20} seconds until it beeps twice. | How do I reset my {product} from {company}? | Which button resets the {product} by {company}?
    The {large_animal} named {name} was born in the zoo of {town} in {month} and weighs {20-300} kilograms. | Where was {name} the {large_animal} born? | How much does {name} weigh, and what kind of animal is it?
    Tickets for the theatre in {town} cost {12-60} euros. Students pay half, and children under {6-12} enter free. | What do students pay at the theatre in {town}? | Until what age do children enter the theatre in {town} free?
    The village of {town} has {200-900} inhabitants, a school and a {building}. The nearest hospital is in {town2}, {12-60} kilometres away. | Where is the hospital nearest to {town}? | How far do people in {town} have to travel to a hospital?
    {name} wrote a diary while working as a {job} in {town}. It was found inside a/an {object} and printed in {1950-2019}. | Where was the diary of {name} found? | What was the occupation of the diarist {name}?
    Parcels from {company} are sent on the day of the order if it arrives before {hour} o'clock. Returns are free for {14-60} days. | For how long can I return an order to {company} free of charge? | When is my parcel from {company} sent?
    Members of the {hobby} club in {town} meet every {day} at {hour}. Beginners can borrow what they need. | Do beginners at the {hobby} club in {town} need to bring their own things? | When does the {hobby} club in {town} meet?
    In {1900-1990} a fire destroyed the {building} of {town}. It was rebuilt within {2-9} years to plans by {name}. | Who planned the new {building} of {town}? | What happened to the {building} of {town}?
    The farm near {town} sells {food} and {fruit} on {day} mornings. It accepts only cash. | Can I pay by card at the farm near {town}? | What does the farm near {town} sell?
    The hostel in {town} has {20-90} beds. Guests must leave their rooms by {hour}, and the kitchen may be used until 10 p.m. | By when must guests of the hostel in {town} leave their rooms? | Does the hostel in {town} have a kitchen that guests can use?
""")
]

# ---------------------------------------------------------------- questions

QA = lines("""
    What is the capital of {country}, and what is it known for?
    Which languages are spoken in {country}?
    What is the climate of {country} like in {season}?
    Which countries or seas border {country}?
    What is a traditional dish from {country}?
    Name a famous river, mountain or lake in {country}.
    What currency is used in {country}?
    Which animals are typical of {country}?
    What does a/an {animal} eat?
    Where does the {animal} live in the wild?
    How long does a/an {animal} usually live?
    How does a/an {animal} protect itself from danger?
    Is the {animal} a mammal, a bird, a reptile, or something else?
    How does a/an {animal} raise its young?
    Which is heavier as an adult, a/an {animal} or a/an {animal2}?
    Can a/an {animal} swim?
    What do people often get wrong about the {animal}?
    What is the difference between {pair}?
    How can I tell the difference between {pair}?
    Define {science} in one sentence.
    What is meant by the term "{science}"?
    Why do people study {science}?
    Who made important discoveries about {science}?
    Give one everyday example of {science}.
    Is there anything that scientists still don't know about {science}?
    When did {humanity} begin or take place?
    Who were the key figures of {humanity}?
    What do historians mean when they speak of {humanity}?
    Where in the world would you look for traces of {humanity}?
    Who invented {invention}, and when?
    What did people use before {invention}?
    What problem did {invention} solve?
    How does {invention} work?
    What does {food} consist of, and where does it come from?
    How is {food} made?
    How should {food} be stored?
    Is {food} healthy?
    What is the function of {body} in the human body?
    How can I look after {body}?
    What can go wrong with {body}, and what are the signs?
    What does a {job} do all day?
    What training does a {job} need?
    Which tools does a {job} use?
    What is a good first step for someone who wants to become a {job} in {country}?
    What equipment do I need for {hobby}?
    Is {hobby} good for your health?
    At what age can one start {hobby}?
    What are the benefits and the drawbacks of {topic}?
    How has the view of {topic} changed in the last fifty years?
    True or false: there is no link between {topic} and the environment. Explain in a sentence.
    What is the main ingredient of {dish}?
    How long does it take to prepare {dish}?
    Which side dish goes well with {dish}?
    Which came first, {invention} or {invention2}?
    Explain briefly: what is {cs}?
    Which is larger in area, {country} or {country2}?
    What should a tourist know about manners in {country}?
    Which month is the best for a visit to {country}, and why not {month}?
""")

QA_SUFFIX = lines("""
    Answer in one sentence.
    Answer briefly.
    Give a short explanation.
    Please answer for {audience}.
    Explain in two or three sentences.
    If it depends, say on what.
    Give the answer first and then the reason.
""")

QA_HAND = lines("""
    How many bones does an adult human have?
    What is the longest river in Europe?
    Why do leaves change colour in autumn?
    Who painted the ceiling of the Sistine Chapel?
    What is the boiling point of water at sea level, in Celsius and in Fahrenheit?
    Why do cats purr?
    Which planet has the most moons?
    How many players are on a volleyball team?
    What does the abbreviation "e.g." stand for?
    Why is seawater salty?
    Who wrote "Pride and Prejudice"?
    How far is it from the Earth to the Moon?
    What is the smallest prime number?
    Why do we yawn?
    Which metal is liquid at room temperature?
    What are the three states of matter that children learn about first?
    In which year did the Second World War end?
    What is the hardest natural material?
    How many time zones does Russia have?
    Why does bread rise?
    Which ocean is the deepest?
    What is a leap second?
    Who was the first person to walk on the Moon?
    What is the name of the longest bone in the body?
    Why do airplanes leave white trails in the sky?
    What is the main language of Brazil, and why?
    What do you call a baby kangaroo?
    How do fish breathe under water?
    Which instrument has 88 keys?
    What is the chemical symbol for gold, and where does it come from?
    Why do some countries drive on the left?
    How many sides does a dodecagon have?
    What causes the phases of the Moon?
    Who discovered the structure of DNA?
    What is a palindrome? Give an example.
    Which vitamin does the skin make in sunlight?
    Why can you see your breath on a cold day?
    What is the tallest animal in the world?
    Where is the Great Sphinx?
    How do submarines dive and come up again?
    What is the national animal of Scotland?
    Why does metal feel colder than wood in the same room?
    Which king had six wives?
    What does a barometer measure?
    Who composed the Four Seasons?
    How many minutes are there in a week?
    What is the difference between a solo and a duet?
    Why do stars twinkle?
    What is the largest island in the world?
    Is glass a liquid or a solid?
""")

# ---------------------------------------------------------------- maths

MATH = lines("""
    {name} has {12-60} {item} and buys {3-12} packs with {4-15} {item} each. How many {item} does {name} have now?
    A shop sells {fruit} at {2-6} euros a kilo. {name} buys {3-9} kilos and pays with a {50-100} euro voucher. How much is left on the voucher?
    A {vehicle} travels {120-480} km in {2-6} hours. What is its average speed?
    A {vehicle} leaves {town} at {6-10}:15 and arrives in {town2} {70-290} minutes later. At what time does it arrive?
    A {vehicle} and a {vehicle2} start {200-600} km apart and move towards each other at {30-60} km/h and {61-90} km/h. After how many hours do they meet?
    {name} reads {12-40} pages a day. The book has {240-620} pages. How many days does {name} need?
    A recipe for {dish} for {2-4} people needs {100-450} grams of flour. How much flour is needed for {5-14} people?
    The price of a {product} rises from {40-90} euros by {5-45} percent. What is the new price?
    A {product} costs {60-400} euros. In the sale it is reduced by {10-60} percent. How much do you save, and what do you pay?
    A rectangular garden is {6-30} m long and {3-20} m wide. Find its area and the length of fence needed to go around it.
    A circle has a radius of {2-15} cm. Work out its circumference and its area, rounded to one decimal place.
    A triangle has angles of {20-80} and {30-90} degrees. How large is the third angle?
    A right triangle has legs of {3-12} cm and {4-16} cm. How long is the hypotenuse?
    A box is {10-40} cm long, {5-30} cm wide and {4-25} cm high. What is its volume in cubic centimetres and in litres?
    Solve for x: {2-9}x + {3-40} = {50-120}.
    Solve the equation {2-9}(x - {1-9}) = {10-70}.
    Solve the system: x + y = {20-60} and x - y = {2-18}.
    Find two numbers whose sum is {15-40} and whose product is {30-54}, or explain why there are no such whole numbers.
    What is {12-98} times {11-49}? Show the steps.
    Divide {400-990} by {6-24} and give the quotient and the remainder.
    What is {5-95} percent of {40-900}?
    Which is larger: {2-7}/{8-13} or {2-7}/{9-15}? Explain.
    Add {1-5}/{6-9} and {1-4}/{5-8} and simplify the result.
    Convert {3-90} kilometres to metres and {120-900} minutes to hours.
    Find the greatest common divisor and the least common multiple of {12-60} and {18-90}.
    Write {60-500} as a product of prime numbers.
    Is {101-399} a prime number? Explain how you checked.
    The first term of a sequence is {2-12}, and each later term is {3-9} more than the one before. What is the {10-20}th term?
    Start at {2-30} and keep adding {3-19}. Write the first eight numbers and a formula for the n-th one.
    Find the sum of all whole numbers from 1 to {30-200}.
    The marks of {name} are {50-70}, {60-80}, {70-90} and {75-99}. What is the average, and what mark is needed next to raise it by 2?
    Find the mean, the median and the range of {3-9}, {10-19}, {4-15}, {20-30} and {8-25}.
    A bag contains {3-9} {color} and {4-12} {color2} balls. What is the probability of drawing a {color} ball, and then a second one without putting the first back?
    Two dice are rolled. What is the probability that the sum is {3-11}?
    A coin is tossed {3-6} times. How likely is it to show heads at least once?
    In how many ways can {name} choose {2-3} of {5-9} books to take on holiday?
    How many {3-4}-digit codes can be made from the digits 1 to {5-9} if no digit is repeated?
    {name} saves {15-80} euros a month. After how many months can {name} afford a {product} for {200-900} euros?
    {name} puts {500-5000} euros into an account with {2-6} percent interest a year. How much is there after {2-4} years with compound interest?
    A tank holds {200-900} litres. One tap fills it at {10-30} litres a minute, while a leak loses {2-8} litres a minute. How long does it take to fill the tank?
    {name} can paint a fence in {3-6} hours and {name2} can paint it in {4-9} hours. How long do they need together?
    {name} is {3-5} times as old as {name2}. In {4-12} years their ages will add up to {50-90}. How old are they now?
    A farmer has chickens and rabbits, {15-40} animals with {70-110} legs in all. How many of each are there?
    A class has {20-34} pupils. {6-15} play football, {5-12} play music and {2-5} do both. How many do neither?
    The scale of a map is 1:{10-90}000. Two villages are {3-20} cm apart on the map. How far apart are they really?
    A stall sold {20-80} small and {10-60} large bowls of {dish} at {3-5} and {6-9} euros. What was the total income?
    {name} earns {11-30} euros an hour as a {job} and works {20-42} hours a week. What is the weekly pay after {10-30} percent tax?
    A theatre has {12-30} rows with {14-36} seats. On {day}, {55-95} percent of the seats were sold. About how many people came?
    Three friends share a bill of {45-150} euros in the ratio 1:2:{3-4}. How much does each of them pay?
    A rope {12-90} m long is cut into two pieces, one of which is {2-10} m longer than the other. How long are the pieces?
    The number of visitors at a museum fell from {500-900} to {200-480}. By what percentage did it fall?
    A car uses {4-9} litres of fuel per 100 km. How much does a trip of {150-800} km cost at {1-2}.{50-95} euros per litre?
    Expand and simplify ({2-6}x + {1-9})(x - {1-9}).
    What are the solutions of x^2 - {5-15}x + {4-6} = 0? Round to two decimals if necessary.
    Differentiate f(x) = {2-9}x^3 - {2-9}x^2 + {1-20}x and find f'({1-4}).
    Find the slope and the intercept of the line through ({0-4}, {1-9}) and ({5-9}, {10-30}).
    Evaluate {2-9} + {3-12} * ({20-40} - {5-18}) / {2-4}, and name the order of operations that you used.
    Round {1000-9999}.{11-99} to the nearest ten, and write {1000-9999} in scientific notation.
    What is 2 to the power of {4-14}, and how many digits does it have?
    Write {20-250} in binary.
    A clock loses {2-9} minutes a day. If it is set correctly on {day} at noon, how wrong is it after {2-6} weeks?
    {name} walks {2-9} km north and then {3-12} km east. How far is {name} from the start in a straight line?
    A pool {20-50} m long is filled to a depth of {1-3} m. It is {8-20} m wide. How many litres of water does it hold?
    At a {event}, {30-90} guests shake hands with each other once. How many handshakes are there?
    {name} made a mistake: "{6-9} x {11-19} = {120-190}, because I added the digits." Find the right answer and explain how to check it.
    Estimate, without a calculator, {190-990} x {21-59}. Then work it out exactly.
""")

MATH_SUFFIX = lines("""
    Show your work.
    Think step by step.
    Give only the result and one line of explanation.
    Explain it to {audience}.
    Write the final answer on its own line.
    Check your answer at the end.
""")

MATH_HAND = lines("""
    A bat and a ball cost 22 euros together. The bat costs 20 euros more than the ball. What does the ball cost?
    Prove that the sum of two odd numbers is always even.
    I think of a number, double it, add 14 and halve the result. Then I subtract my first number. Why is it always 7?
    Why can't we divide by zero? Explain in three sentences.
    How many squares of any size are there on a board of 4 by 4 squares?
    If five machines make five parts in five minutes, how long do a hundred machines need for a hundred parts?
    A lily pad doubles in size each day and covers the pond on day 48. On which day did it cover half?
    What is the sum of the interior angles of a hexagon, and how can you see it?
    Is 0.999... equal to 1? Give one argument.
    Half of a number is 12 more than a third of it. Which number is it?
    A train 200 m long passes a pole in 8 seconds. How fast is it in km/h?
    Which is the better deal: 20 percent off and then another 10 percent off, or 28 percent off at once?
    How many times a day do the hour hand and the minute hand lie exactly on top of each other?
    A cube has a surface of 150 square centimetres. What is its volume?
    Show that the square root of 2 is irrational.
    Seven people sit in a circle. In how many different orders can they sit?
    Grandma is 63 and her grandchild is 7. When will she be exactly five times as old?
    A pizza of 30 cm costs 9 euros and one of 40 cm costs 14 euros. Which gives more pizza for the money?
    Find the last digit of 7 to the power of 100.
    Three consecutive whole numbers add up to 141. What are they?
    What is the area of a square whose diagonal is 10 cm?
    My watch shows 2:40. How many degrees has the minute hand turned since 2:00?
    A jar holds only 10 and 50 cent coins, 40 coins worth 10.80 in all. How many of each are there?
    The ratio of cats to dogs in a shelter is 3 to 5, and there are 18 more dogs than cats. How many animals are there?
    Integrate 3x^2 + 2x from 0 to 2 and explain each step.
""")

# ---------------------------------------------------------------- code

CODE = lines("""
    Write a {prog} function that {task}.
    Write a {prog} program that {task}.
    In {prog}, write code that {task}. Add comments.
    Show me how to write {prog} code that {task}, and explain how it works.
    I need a {prog} function that {task}. It should handle empty input.
    Implement a function in {prog} that {task}, and give two examples of its use.
    Write a {prog} function that {task}, together with three unit tests.
    I'm new to {prog}. Please write a short, readable program that {task}.
    Using only the standard library of {prog}, write a function that {task}.
    Write a {prog} class with a method that {task}.
    Give two different solutions in {prog} for a function that {task}, and compare their speed.
    What is the time complexity of a {prog} function that {task}? Write it first.
    Write pseudocode for an algorithm that {task}, then turn it into {prog}.
    Write a function that {task}, first in {prog} and then in {prog2}.
    Create a command-line tool in {prog} that {task}. It should print a usage message for bad arguments.
    Write a recursive or iterative {prog} function that {task}, and say why you chose that form.
    My teacher wants a {prog} function that {task}. Which steps should I follow? End with the full code.
    Write the shortest clear {prog} function that {task}.
    Write {prog} code with type annotations, if the language has them, that {task}.
    Review idea: {name} wants a {prog} function that {task} to run on a million inputs. Write it and point out the slow part.
    Write a docstring or comment block and the body of a {prog} function that {task}.
    Complete the program. Language: {prog}. Goal: code that {task}. Output only code.
    What does this code print, and why?\\n\\n{snippet}
    Explain this code line by line to {audience}.\\n\\n{snippet}
    Find the bug in this code, if there is one, and fix it.\\n\\n{snippet}
    Here is some code from {name}. How would you improve it?\\n\\n{snippet}
    Rewrite this code so that it is shorter and clearer:\\n\\n{snippet}
    Add error handling to the following code.\\n\\n{snippet}
    Write two tests for this code:\\n\\n{snippet}
    Translate this snippet to {prog}:\\n\\n{snippet}
    Suggest better names and a comment for this code:\\n\\n{snippet}
    {name} says that this code is correct. Do you agree?\\n\\n{snippet}
    Given the table {table}, write a SQL query that {query}.
    Write SQL for the table {table}: a query that {query}. Explain each clause.
    I have a table {table}. Show the CREATE TABLE statement and a query that {query}.
    Write a {prog} program that stores rows of {table} in memory and prints them sorted by the second field.
    Define a data type in {prog} for a record {table} and a function that prints one record.
    Build a {ui} with HTML, CSS and plain JavaScript.
    Write the HTML and CSS for a {ui}. Use the colour {color} for the main element.
    Make a small React component for a {ui}.
    What should be tested in a {ui}? Write the test cases as a list and code one of them in JavaScript.
    Write a Bash script that {shell}.
    Write a Bash script that {shell}, and explain each command in a comment.
    Write a {prog} program that {shell}.
    Explain {cs} with a short example in {prog}.
    What is {cs}? Show a small piece of {prog} code.
    When should I use {cs} and when not? Give an example in {prog}.
    Write a {prog} exercise for students about {cs}, with a sample solution.
    Model a {building} in {prog}: a class with a name, opening hours, a list of visitors and two useful methods.
    Write a {prog} class for a {animal} in a zoo game, with a name, an age and a method to feed it.
    Write a {prog} program that asks for {3-9} numbers and prints their sum, product and average.
    Write a text adventure in {prog} that is set in {place} and has at least three choices.
    Write a {prog} function that computes the price of {3-20} {item}, with a discount of {5-30} percent above {50-200} euros.
    Write a regular expression in {prog} that finds dates such as {1-28}.{1-12}.{1990-2024} in a text.
    Parse this line in {prog} and print each field on its own line: "{name};{job};{town};{20-65}".
    Write JSON for a {product} by {company} with a price, three features and two reviews, then {prog} code that reads it.
    Write a {prog} script that prints a shopping list for {dish}, scaled to {2-12} people.
    Draw a {color} square and a {color2} circle with the Python turtle module, {50-200} pixels wide.
    Write a git command sequence to create a branch called {fruit}, commit a change and merge it back. Explain each step.
    Write a Dockerfile for a small {prog} web service that listens on port {3000-9000}.
""")

CODE_HAND = lines("""
    Why does 0.1 + 0.2 not equal 0.3 in most programming languages? Show it in Python.
    Write a FizzBuzz program in Python without using the modulo operator.
    How do I read a file line by line in Python without loading it all into memory?
    Write a Makefile for a C project with main.c and util.c.
    Explain the difference between "==" and "===" in JavaScript, with five examples.
    Write a Python context manager that prints how long its block took.
    How can I sort a list of dictionaries by two keys in Python?
    Write a CSS rule set that centres a box both vertically and horizontally.
    Show how to use async and await in JavaScript to fetch two addresses at the same time.
    Write a Python generator that yields the lines of a log file that contain a given word.
    Explain the difference between a list, a tuple and a set in Python.
    Write a C program that reads integers until the end of input and prints the largest.
    How do I undo my last git commit without losing my changes?
    Write a Rust function that returns the first word of a string slice.
    Write a Go program with two goroutines that pass a counter back and forth over a channel.
    Write a Haskell function that doubles every second element of a list.
    What does "git rebase" do, and when should it be avoided?
    Write an SQL schema for a small library with books, members and loans.
    Create a Python dataclass for a point in the plane, with a method for the distance to another point.
    Write a Java method that returns the number of days in a given month and year.
    How would you store passwords safely in a web application? Give a short example in Python.
    Write a small Flask application with one route that returns the current time as JSON.
    Write an R script that loads a CSV file and plots a histogram of one column.
    Explain what this shell command does: grep -rn "TODO" src | sort | uniq -c
    Write a Lua function that clamps a number between two limits.
    Use NumPy to make a 5 by 5 matrix of random integers and print the sum of each row.
    With pandas, how can I group sales by month and show the total for each?
    Write a PHP snippet that greets a visitor by the name given in a form, and make it safe.
    Write an assembly-like listing, with comments, that adds two numbers and stores the result.
    How do I write a loop in Swift that counts down from ten to one?
""")

# ---------------------------------------------------------------- making prompts

SLOT = re.compile(r"\{(?:(\d+)-(\d+)|([a-z_]+)(\d?))\}")
ARTICLE = re.compile(r"\b([Aa])/[Aa]n (\w+)")


class Deck:
    """Draws entries at random, and each of them once before any comes again."""

    def __init__(self, entries, rng):
        self.entries, self.rng, self.left = list(entries), rng, []

    def draw(self):
        if not self.left:
            self.left = self.rng.sample(self.entries, len(self.entries))
        return self.left.pop()


class Filler:
    """Fills the slots of the templates of one prompt with consistent values."""

    def __init__(self, rng):
        self.rng, self.values = rng, {}

    def slot(self, match):
        low, high, name, number = match.groups()
        if low:
            return str(self.rng.randint(int(low), int(high)))
        key = name + number
        if key not in self.values:
            used = {v for k, v in self.values.items() if k.rstrip("0123456789") == name}
            self.values[key] = self.rng.choice([v for v in SLOTS[name] if v not in used])
        return self.values[key]

    def fill(self, template):
        return fix_articles(SLOT.sub(self.slot, template))


def fix_articles(text):
    text = ARTICLE.sub(lambda m: m[1] + ("n " if m[2][0].lower() in "aeiou" else " ") + m[2], text)
    return re.sub(
        r"\ba (?=(?:air|alarm|alligator|ant|apple|architect|art|eagle|electric|electrician|elephant|elevator|email|excited|"
        r"image|office|old|omelette|open-air|orange|ostrich|otter|overworked|owl)\b)",
        "an ",
        text,
    )


def fill_layout(layout, **parts):
    """Puts finished parts into a layout; unlike str.format it leaves braces in the parts alone."""
    return re.sub(r"\{(" + "|".join(parts) + r")\}", lambda m: parts[m[1]], layout)


def template_maker(templates, suffixes, rng):
    """Prompts from the templates, every third of them followed by a suffix."""
    deck, suffix_deck = Deck(templates, rng), Deck(suffixes or [""], rng)
    while True:
        text = deck.draw()
        if suffixes and rng.random() < 1 / 3:
            text += " " + suffix_deck.draw()
        yield Filler(rng).fill(text)


def translation_maker(rng):
    to_foreign, english = Deck(TO_FOREIGN, rng), Deck(ENGLISH_TEXTS, rng)
    to_english = Deck(TO_ENGLISH, rng)
    sources = {name: Deck(texts, rng) for name, texts in SOURCE_TEXTS.items()}
    while True:
        filler = Filler(rng)
        if rng.random() < 0.65:
            layout = to_foreign.draw()
            for slot in ("language", "language2"):
                layout = layout.replace("{" + slot + "}", filler.fill("{" + slot + "}"))
            text = filler.fill(english.draw())
        else:
            source = rng.choice(list(sources))
            layout, text = to_english.draw(), Filler(rng).fill(sources[source].draw())
            layout = layout.replace("{source}", source)
        yield fill_layout(layout, text=text, quoted=f'"{text}"')


def scenario_passage(scenario, rng):
    """The text of a scenario, without up to two of its later sentences."""
    first, rest = scenario[0], scenario[1:]
    kept = sorted(rng.sample(range(len(rest)), len(rest) - rng.randint(0, 2)))
    return Filler(rng).fill(" ".join([first] + [rest[i] for i in kept]))


def facts_passage(deck):
    """Two fact passages that follow one another like short encyclopedia notes."""
    facts = [deck.draw() for _ in range(2)]
    return "\n".join(f"{topic[0].upper()}{topic[1:]}. {passage}" for topic, passage, *_ in facts)


def summarization_maker(rng):
    scenarios, facts = Deck(SCENARIOS, rng), Deck(FACTS, rng)
    instructions, layouts = Deck(SUMMARY_INSTRUCTIONS, rng), Deck(SUMMARY_LAYOUTS, rng)
    while True:
        if rng.random() < 0.85:
            passage = scenario_passage(scenarios.draw(), rng)
        else:
            passage = facts_passage(facts)
        instruction = instructions.draw().replace("{one_to_three}", rng.choice(ONE_TO_THREE))
        yield fill_layout(
            layouts.draw(), instruction=Filler(rng).fill(instruction), passage=passage
        )


def rag_maker(rng):
    """A question with the passage that answers it and one to three others, in random order."""
    facts, records = Deck(FACTS, rng), Deck(RECORDS, rng)
    layouts, marks = Deck(RAG_LAYOUTS, rng), Deck(PASSAGE_MARKS, rng)
    while True:
        if rng.random() < 0.55:
            _, passage, *questions = facts.draw()
            question = rng.choice(questions)
            others = [facts.draw()[1] for _ in range(rng.randint(1, 2))]
        else:
            filler = Filler(rng)
            passage, *questions = records.draw()
            passage, question = filler.fill(passage), filler.fill(rng.choice(questions))
            others = [Filler(rng).fill(records.draw()[0]) for _ in range(rng.randint(2, 3))]
        passages = [passage, *others]
        rng.shuffle(passages)
        mark = marks.draw()
        listed = "\n".join(mark.replace("{n}", str(n)) + p for n, p in enumerate(passages, 1))
        yield fill_layout(layouts.draw(), passages=listed, question=question)


def makers(rng):
    """For each kind, its hand-written prompts and an endless maker of further ones."""
    return {
        "conversation": (CONVERSATION_HAND, template_maker(CONVERSATION, CONVERSATION_SUFFIX, rng)),
        "translation": (TRANSLATION_HAND, translation_maker(rng)),
        "summarization": ([], summarization_maker(rng)),
        "qa": (QA_HAND, template_maker(QA, QA_SUFFIX, rng)),
        "math": (MATH_HAND, template_maker(MATH, MATH_SUFFIX, rng)),
        "rag": ([], rag_maker(rng)),
        "code": (CODE_HAND, template_maker(CODE, [], rng)),
    }


def normalise(text):
    return " ".join(text.lower().split())


def make_kind(by_hand, maker, count, seen, rng):
    """`count` prompts, unique after normalisation, in random order."""
    prompts = []
    for text in by_hand:
        seen.add(normalise(text))
        prompts.append(text)
    while len(prompts) < count:
        text = next(maker)
        if normalise(text) not in seen:
            seen.add(normalise(text))
            prompts.append(text)
    rng.shuffle(prompts)
    return prompts[:count]


def make_rows(per_kind, seed):
    rng, seen = random.Random(seed), set()
    prompts = {
        kind: make_kind(*source, per_kind, seen, rng) for kind, source in makers(rng).items()
    }
    rows = []
    for i in range(per_kind):
        for kind in rng.sample(KINDS, len(KINDS)):
            rows.append(
                {"id": f"train-{kind}-{i + 1:04d}", "kind": kind, "turns": [prompts[kind][i]]}
            )
    return rows


# ---------------------------------------------------------------- checks


def ngrams(text):
    """The word n-grams of a text; a shorter text is one gram."""
    tokens = re.findall(r"\w+", text.lower())
    return {tuple(tokens[i : i + NGRAM]) for i in range(max(1, len(tokens) - NGRAM + 1))}


def find_problems(rows, heldout):
    """One line for each training prompt that is too long or too close to a held-out one."""
    held = [(row["id"], ngrams(" ".join(row["turns"]))) for row in heldout]
    index = {}
    for n, (_, grams) in enumerate(held):
        for gram in grams:
            index.setdefault(gram, set()).add(n)
    problems = []
    for row in rows:
        text = " ".join(row["turns"])
        if len(text.split()) > MAX_WORDS:
            problems.append(f"{row['id']} has more than {MAX_WORDS} words")
        grams = ngrams(text)
        for n in sorted(set().union(*(index.get(g, ()) for g in grams))):
            overlap = len(grams & held[n][1]) / min(len(grams), len(held[n][1]))
            if overlap > MAX_OVERLAP:
                problems.append(
                    f"{row['id']} is too close to {held[n][0]} ({overlap:.2f}): {text[:80]!r}"
                )
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--per-kind", type=int, default=620, help="prompts per kind (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=17, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--heldout",
        type=Path,
        default=PROMPTS_DIR / "heldout.jsonl",
        help="held-out prompts to keep away from",
    )
    parser.add_argument(
        "--out", type=Path, default=PROMPTS_DIR / "train.jsonl", help="file to write"
    )
    args = parser.parse_args()

    heldout = [json.loads(line) for line in args.heldout.read_text(encoding="utf-8").splitlines()]
    rows = make_rows(args.per_kind, args.seed)
    problems = find_problems(rows, heldout)
    if problems:
        sys.exit("not written, since some prompts did not pass:\n" + "\n".join(problems))
    args.out.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    print(f"{args.out}: {len(rows)} prompts, {args.per_kind} of each kind")


if __name__ == "__main__":
    main()
