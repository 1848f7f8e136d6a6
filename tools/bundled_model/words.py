# SPDX-License-Identifier: Apache-2.0
"""Vocabulary of the bundled model's training text: the small world in which its stories happen."""


def _words(text: str) -> list[str]:
    return text.split()


GIRLS = _words("Mia Anna Lily Rosa Nora Clara Emma Ruth Lucy Greta")
BOYS = _words("Tom Ben Sam Max Leo Jack Noah Omar Peter Hugo")
HERO_TRAITS = _words("little kind brave clever young cheerful quiet curious careful gentle")

ANIMALS = _words("cat dog rabbit fox bird duck mouse horse goat frog bear squirrel hedgehog owl lamb turtle")
PET_NAMES = _words("Spot Bella Biscuit Pepper Shadow Honey Ginger Pip Rusty Daisy")
ANIMAL_TRAITS = _words("small brown white black grey hungry tired friendly shy fluffy")
SOUNDS = {
    "cat": "meows", "dog": "barks", "duck": "quacks", "cow": "moos", "sheep": "bleats", "horse": "neighs",
    "frog": "croaks", "owl": "hoots", "bee": "buzzes", "mouse": "squeaks", "pig": "grunts", "bird": "sings",
    "lion": "roars", "wolf": "howls",
}  # fmt: skip
HOMES = {
    "fish": "in the water", "bird": "in a nest", "bear": "in a cave", "bee": "in a hive", "fox": "in a den",
    "cow": "in a barn", "frog": "near a pond", "camel": "in the desert", "whale": "in the sea",
    "monkey": "in the trees", "spider": "in a web", "king": "in a castle", "farmer": "on a farm",
    "horse": "in a stable", "penguin": "in the cold south",
}  # fmt: skip
LEGS = {
    "dog": "four", "cat": "four", "bird": "two", "spider": "eight", "horse": "four", "duck": "two",
    "bee": "six", "cow": "four", "ant": "six", "snake": "no", "fish": "no", "frog": "four", "chicken": "two",
}  # fmt: skip
# From the smallest to the biggest.
SIZES = _words("ant bee mouse frog cat dog sheep lion cow horse elephant whale")

COLOURS = _words("red blue green yellow white black brown orange purple golden silver pink")
TOYS = _words("ball kite boat doll hat drum book lantern scarf basket key box whistle bell coat ring")
THING_COLOURS = {
    "sky": "blue", "grass": "green", "sun": "yellow", "snow": "white", "night": "black", "coal": "black",
    "lemon": "yellow", "tomato": "red", "milk": "white", "carrot": "orange", "strawberry": "red",
    "cloud": "white", "banana": "yellow", "sea": "blue", "leaf": "green", "chocolate": "brown",
    "moon": "silver", "raven": "black", "rose": "red", "pig": "pink", "elephant": "grey",
}  # fmt: skip
FOODS = _words("bread cake cheese apples berries pancakes honey pears rice carrots cookies plums nuts")
SWEETS = ["a cake", "a pie", "pancakes", "cookies", "a loaf of bread", "apple tarts"]
INGREDIENTS = _words("flour milk sugar butter eggs salt honey")

PLACES = [
    "the park", "the forest", "the river", "the hill", "the market", "the beach", "the lake", "the garden",
    "the old mill", "the village", "the meadow", "the harbour", "the bridge", "the castle", "the farm",
]  # fmt: skip
HIDING_PLACES = [
    "under the bed", "behind the door", "under a big tree", "in the tall grass", "behind a stone",
    "on the roof", "in the basket", "under the table", "near the well", "in the kitchen", "by the gate",
]  # fmt: skip
HOUSES = [
    "a small house near the river", "a village by the sea", "a cottage at the edge of the forest",
    "a farmhouse on a hill", "a town with narrow streets", "a tall house beside the market",
]  # fmt: skip
TIMES = ["morning", "afternoon", "evening"]
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
SEASONS = _words("spring summer autumn winter")
WEATHER = _words("sunny windy cold warm rainy foggy bright snowy")
HELPERS = ["an old farmer", "a kind baker", "a fisherman", "the miller", "a shepherd", "a tall carpenter"]
PARENTS = ["mother", "father", "grandmother", "grandfather", "aunt", "uncle"]
SEEDS = ["sunflower", "bean", "apple", "pumpkin", "tomato", "rose"]
PROJECTS = ["a tree house", "a little boat", "a big kite", "a wooden bridge", "a sand castle", "a bird house"]
HOBBIES = [
    "read", "sing", "swim", "draw", "paint", "dance", "climb trees", "play football", "bake", "fly kites",
    "count the stars", "ride a bicycle", "feed the ducks", "build boats",
]  # fmt: skip
JOBS = _words("teacher baker farmer doctor sailor painter carpenter gardener cook singer pilot writer")
NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)

OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("day", "night"), ("up", "down"), ("fast", "slow"), ("happy", "sad"),
    ("open", "closed"), ("old", "young"), ("light", "dark"), ("wet", "dry"), ("full", "empty"),
    ("hard", "soft"), ("left", "right"), ("high", "low"), ("loud", "quiet"), ("first", "last"),
    ("black", "white"), ("early", "late"), ("long", "short"), ("strong", "weak"),
]  # fmt: skip
CAPITALS = [
    ("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"),
    ("England", "London"), ("Egypt", "Cairo"), ("Austria", "Vienna"), ("Norway", "Oslo"),
    ("Greece", "Athens"), ("Portugal", "Lisbon"), ("Poland", "Warsaw"), ("China", "Beijing"),
    ("Sweden", "Stockholm"), ("the United States", "Washington"), ("Canada", "Ottawa"),
]  # fmt: skip
USES = [
    ("a knife", "cut bread"), ("a pen", "write"), ("an umbrella", "stay dry in the rain"),
    ("a lamp", "see in the dark"), ("a key", "open a door"), ("a boat", "travel over the water"),
    ("a broom", "clean the floor"), ("a clock", "tell the time"), ("a cup", "drink tea"),
    ("a ladder", "climb up high"), ("a blanket", "keep warm"), ("a map", "find the way"),
    ("a needle", "mend clothes"), ("a bell", "call people together"), ("a bridge", "cross a river"),
]  # fmt: skip
WHYS = [
    ("why do birds have wings", "Birds have wings so that they can fly."),
    ("why do we sleep", "We sleep because our body needs rest."),
    ("why does ice melt", "Ice melts because it gets warm."),
    ("why do plants need water", "Plants need water because without it they dry out and die."),
    ("why is it dark at night", "It is dark at night because the sun is on the other side of the earth."),
    ("why do we wear coats in winter", "We wear coats in winter because it is cold outside."),
    ("why do we eat", "We eat because food gives us strength."),
    ("why does a boat float", "A boat floats because it is lighter than the water it pushes away."),
    ("why do leaves fall in autumn", "Leaves fall in autumn because the tree saves its water for winter."),
    ("what is rain", "Rain is water that falls from the clouds."),
    ("what is snow", "Snow is frozen water that falls from cold clouds."),
    ("what is a river", "A river is water that flows through the land to the sea."),
    ("what is a forest", "A forest is a place where many trees grow close together."),
    ("what do bees make", "Bees make honey."),
    ("what do cows eat", "Cows eat grass."),
    ("where does the sun rise", "The sun rises in the east."),
    ("where does the sun set", "The sun sets in the west."),
    ("how many days are in a week", "There are seven days in a week."),
    ("how many months are in a year", "There are twelve months in a year."),
    ("how many seasons are there", "There are four seasons: spring, summer, autumn and winter."),
    ("what is machine learning", "Machine learning is a way to let a computer learn from examples "
     "instead of following fixed rules."),
    ("what is deep learning", "Deep learning is machine learning with neural networks of many layers."),
    ("what is a token", "A token is a short piece of text, often a word or a part of a word."),
    ("what is a language model", "A language model is a program that reads text and guesses the next token."),
    ("what is a GPU", "A GPU is a processor that does many small calculations at the same time."),
    ("who are you", "I am a very small language model that tells simple stories."),
    ("what can you do", "I can tell short stories and answer a few simple questions."),
    ("how are you", "I am well, thank you. How are you?"),
]  # fmt: skip
