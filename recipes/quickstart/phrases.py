# SPDX-License-Identifier: Apache-2.0
"""Word lists and sentence tables of the quickstart grammar (read by corpus.py)."""

NAMES = (
    "Mira Tobin Elsa Jonas Petra Felix Nora Hugo Lena Oskar Ruby Milo Ada Bruno Clara Dario "
    "Edith Fiona Gus Hanna Ivan Jill Karl Luca Maya Nils Olga Pablo Quinn Rosa Sven Tara Uma "
    "Viktor Wanda Xenia Yara Zoe Arlo Beth Cyril Dora Emil Freya Gwen Henrik Iris Jasper"
).split()

# Each class is one row; the row number picks the sentence variant.
ANIMALS = (
    "raven robin bat heron crow moth",  # flies
    "newt seal frog beaver duck turtle",  # swims
    "goat squirrel lizard monkey cat panda",  # climbs
    "badger mole rabbit fox hedgehog mouse",  # digs
)
OBJECTS = (
    "lantern kettle bell key compass spoon",  # metal
    "drum chair flute ladder barrel paddle",  # wood
    "scarf blanket tent flag glove pillow",  # cloth
    "letter map book kite card poster",  # paper
)
PLACES = (
    "lake river harbour beach island pond",  # water
    "hill valley cliff ridge cave peak",  # height
    "market station library bakery school museum",  # town
    "forest orchard meadow garden grove park",  # green
)
DISHES = ("soup stew curry broth", "pie cake bread tart", "salad dip jam salsa", "pancake fritter omelette waffle")
VEHICLES = ("bus tram lorry", "boat ferry canoe", "bike scooter skateboard", "sledge train cart")
MOODS = ("happy", "brave", "sleepy", "curious", "shy")
WEATHERS = ("sunny", "rainy", "windy", "snowy", "foggy")
TIMES = ("dawn", "noon", "dusk", "midnight")
COLOURS = "red blue green yellow purple white black pink".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
CROPS = "turnip carrot pear plum mushroom lemon potato pumpkin ginger pepper cherry tomato".split()
NUMBERS = "two three four five six seven eight nine".split()

# Facts the target has to know, since no prompt says them.
FOODS = ("seeds", "berries", "clover", "nuts", "worms", "lettuce")
KEEPERS = ("Mr Finch", "Mrs Vale", "old Captain Rook", "young Dr Lind", "the baker", "the twins")

# kind -> (slot paired with the name by the held-out rule, prompts, parts).
# A part is (slot whose class chooses, variants).
KINDS = {
    "story": ("animal", (
        "Tell a {mood} story about {name} the {animal} who finds a {colour} {object} at the {place}.",
        "Write a short {mood} tale: {name} is a {animal}, the place is the {place}, and there is a {colour} {object}.",
    ), (
        ("mood", ("Once upon a time {name} the {animal} woke up laughing because the sun was warm.",
                  "Nobody in the whole land was as fearless as {name} the {animal}.",
                  "Long after breakfast {name} the {animal} was still yawning under the covers.",
                  "Every question in the world belonged to {name} the {animal}, who never stopped asking.",
                  "Behind the tallest fern hid {name} the {animal}, hoping to stay unseen.")),
        ("place", ("Down at the {place} the waves had washed up a {colour} {object}.",
                   "High above the clouds near the {place} something {colour} glittered, and it was a {object}.",
                   "Between the busy people of the {place} somebody had dropped a {colour} {object}.",
                   "Under the leaves of the {place} lay a {colour} {object} covered with moss.")),
        ("object", ("The {object} was heavy and cold, and it rang like silver when touched.",
                    "The {object} smelled of fresh pine and felt smooth under careful paws.",
                    "The {object} was soft as snow, with tiny stitches along the edge.",
                    "The {object} was thin and light, and faded ink told a secret.")),
        ("animal", ("So {name} flew over the rooftops to bring it home before the moon came up.",
                    "So {name} dived into the stream and swam home with the treasure.",
                    "So {name} climbed the highest branch and showed it to everyone below.",
                    "So {name} dug a deep tunnel and kept it safe for the winter.")),
    )),
    "packing": ("place", (
        "{name} travels to the {place} on {day} and it will be {weather}. What should go in the {colour} bag?",
        "Make a packing list for {name}: a {weather} {day} at the {place}, with a {colour} bag.",
    ), (
        ("weather", ("First of all, sun cream and a wide hat belong on top of the {colour} bag.",
                     "A long raincoat and rubber boots must come first in the {colour} bag.",
                     "Pack a tight jacket and a strong rope at the bottom of the {colour} bag.",
                     "Thick mittens and woollen socks will fill half of the {colour} bag.",
                     "Put a bright torch and a whistle into the side of the {colour} bag.")),
        ("place", ("Since the {place} is wet, {name} also needs a towel and a swimming ring.",
                   "Since the {place} is steep, {name} also needs walking sticks and a helmet.",
                   "Since the {place} is crowded, {name} also needs some coins and a ticket.",
                   "Since the {place} is wild, {name} also needs a magnifier and insect spray.")),
        ("weather", ("Cold lemonade keeps everybody cheerful in such heat.",
                     "Dry matches wrapped in plastic are worth their weight in gold.",
                     "Leave the umbrella at home, for it would only break.",
                     "Hot cocoa in a flask makes the frost easier to bear.",
                     "Stay close together and count the group every hour.")),
        ("day", ("{name} should leave early, as {day} is the start of the week.",
                 "{name} should call home, as {day} is when grandmother waits.",
                 "{name} should bring cake, as {day} is the middle of the week.",
                 "{name} should water the plants, as {day} is usually forgotten.",
                 "{name} should book a seat, as {day} is always very full.",
                 "{name} should sleep longer, as {day} is a free morning.",
                 "{name} should come back early, as {day} is a quiet evening.")),
    )),
    "route": ("target", (
        "How does {name} get from the {place} to the {target} by {vehicle} at {time}?",
        "Describe the way for {name}, who takes the {vehicle} at {time} from the {place} to the {target}.",
    ), (
        ("place", ("Leave the {place} along the wooden pier and turn left at the lighthouse.",
                   "Leave the {place} by the stone steps and keep right of the waterfall.",
                   "Leave the {place} through the iron gate and cross the main street.",
                   "Leave the {place} on the narrow footpath and follow the white arrows.")),
        ("vehicle", ("The {vehicle} stops beside the fountain, and the driver sells tickets to {name}.",
                     "The {vehicle} waits below the bridge, and the sailor will greet {name} with a song.",
                     "The {vehicle} stands behind the shed, and the chain must be oiled by {name}.",
                     "The {vehicle} rolls slowly over the fields, so {name} can enjoy the view.")),
        ("time", ("Birds will be singing while the first light touches the roofs.",
                  "Clocks strike twelve just as the longest stretch begins.",
                  "Lamps are being lit while the shadows grow longer.",
                  "Stars are the only guide, so carry a small candle.")),
        ("target", ("After the last bend {name} can hear the water, and the {target} lies ahead.",
                    "After the last bend {name} sees the ground rise, and the {target} lies ahead.",
                    "After the last bend {name} passes shop windows, and the {target} lies ahead.",
                    "After the last bend {name} smells fresh flowers, and the {target} lies ahead.")),
    )),
    "recipe": ("crop", (
        "Give {name} a recipe for {crop} {dish} with {extra} for {number} people, served in a {colour} dish.",
        "{name} wants to make {crop} {dish} for {number} guests. There is also {extra} and a {colour} dish. How?",
    ), (
        ("number", ("For {number} people {name} should wash one {crop} and peel it carefully.",
                    "For {number} people {name} should chop half a {crop} into fine cubes.",
                    "For {number} people {name} should grate a whole {crop} with a sharp grater.",
                    "For {number} people {name} should slice every {crop} from the basket.")),
        ("dish", ("Boil it gently in a large pot until the steam smells sweet.",
                  "Fold it into the dough and bake until the crust is golden.",
                  "Mix it raw with oil and vinegar, then let it rest.",
                  "Stir it into the batter and fry both sides in butter.")),
        ("extra", ("A little {extra} on top gives the {dish} a wonderful colour.",
                   "Some roasted {extra} inside makes the {dish} taste like summer.",
                   "The juice of a {extra} keeps the {dish} from drying out.")),
        ("colour", ("Serve everything in the {colour} dish while it is still hot.",
                    "Let the {colour} dish cool down near an open window.",
                    "Cover the {colour} dish with a cloth until dinner begins.",
                    "Carry the {colour} dish to the table and light candles.")),
    )),
    "letter": ("object", (
        "Write a {mood} letter from {name} to {friend} about the {object} that was left at the {place}.",
        "{name} left a {object} at the {place}. Help {name} write to {friend} in a {mood} voice.",
    ), (
        ("mood", ("Dear {friend}, what a splendid week this has been for all of us!",
                  "Dear {friend}, I am not afraid to admit my mistake any more.",
                  "Dear {friend}, please excuse my handwriting, because I can barely keep my eyes open.",
                  "Dear {friend}, have you ever wondered where lost things spend the night?",
                  "Dear {friend}, I hope you will not mind this little note.")),
        ("object", ("My {object} is shiny, and the handle carries a deep scratch.",
                    "My {object} was carved by an uncle out of one solid oak.",
                    "My {object} was sewn by hand and has two loose buttons.",
                    "My {object} has a folded corner and a coffee stain.")),
        ("place", ("I forgot it at the {place}, right where the boats are tied up.",
                   "I forgot it at the {place}, next to the pile of grey rocks.",
                   "I forgot it at the {place}, on the bench by the entrance.",
                   "I forgot it at the {place}, among the roots of a tall tree.")),
        ("mood", ("Let us celebrate together when it returns, with a thousand hugs from {name}.",
                  "I will fetch it myself if I must, your loyal {name}.",
                  "Wake me when it turns up, good night from {name}.",
                  "Tell me every detail you discover, yours with interest, {name}.",
                  "Only if it is no trouble, quietly yours, {name}.")),
    )),
    "care": ("animal", (
        "How should {name} look after a {animal} with a {colour} ribbon on a {weather} {day}?",
        "{name} has a {mood} {animal} with a {colour} ribbon. Explain the care for a {weather} {day}.",
    ), (
        ("animal", ("A {animal} needs fresh air, so {name} should open the roof of the cage.",
                    "A {animal} needs clean water, so {name} should fill the tub to the brim.",
                    "A {animal} needs good footholds, so {name} should build a tower of logs.",
                    "A {animal} needs loose earth, so {name} should spread sand over the floor.")),
        ("food", ("Feed it a handful of {food} before anybody else has eaten.",
                  "Twice a day it deserves {food} from a shallow plate.",
                  "Hide some {food} around the room and watch it search.")),
        ("weather", ("Heat is dangerous, therefore draw the curtains in the afternoon.",
                     "Dampness is harmful, therefore dry its coat with a warm cloth.",
                     "Draughts are unhealthy, therefore close each door with great care.",
                     "Frost is a risk, therefore place a hot bottle near its bed.",
                     "Mist confuses it, therefore do not let it wander outdoors.")),
        ("colour", ("Finally, tie the {colour} ribbon loosely and praise it with gentle words.",
                    "Finally, exchange the {colour} ribbon for a new one every {day}.",
                    "Finally, wash the {colour} ribbon with mild soap and rinse it well.",
                    "Finally, take off the {colour} ribbon whenever it goes to sleep.")),
    )),
    "report": ("place", (
        "Read the {weather} weather report for the {place} on {day} at {time}, presented by {name}.",
        "{name} reports from the {place}: it is {time} on {day} and {weather}. What does the forecast say?",
    ), (
        ("time", ("Good morning, this is {name} with the very first news of {day}.",
                  "Welcome to lunch, here is {name} with an update for {day}.",
                  "Good evening, {name} speaking, and we look back at {day}.",
                  "It is late, but {name} is still awake to close {day}.")),
        ("weather", ("The sky is perfectly clear and thermometers keep climbing.",
                     "Dark clouds pour without pause and gutters are overflowing.",
                     "Strong gusts shake the fences and hats go missing.",
                     "Fresh flakes cover the rails and ploughs are out.",
                     "Visibility is below ten steps and horns are sounding.")),
        ("place", ("Around the {place} fishermen should check their nets and mooring lines.",
                   "Around the {place} hikers should turn back before the trail gets slippery.",
                   "Around the {place} shoppers should expect delays and blocked pavements.",
                   "Around the {place} gardeners should protect young shoots with straw.")),
        ("weather", ("Tomorrow brings even more of it, so refill your water bottles.",
                     "Tomorrow could see a rainbow, provided that the front moves east.",
                     "Tomorrow should be calmer, although branches may still fall.",
                     "Tomorrow will freeze again, which pleases all the skaters.",
                     "Tomorrow it lifts slowly, and the hills become visible.")),
    )),
    "lost": ("object", (
        "{name} lost a {colour} {object} near the {place} on {day}. Write a notice.",
        "Write a lost and found notice for {name}: {colour} {object}, {place}, {day}.",
    ), (
        ("day", ("Attention please: a {colour} {object} has been missing since {day}.",
                 "Have you seen it? A {colour} {object} vanished on {day}.",
                 "Reward offered for a {colour} {object} that disappeared last {day}.")),
        ("place", ("It probably slipped overboard close to the {place} during a boat race.",
                   "It probably rolled down the slope close to the {place} during a hike.",
                   "It probably stayed on a counter close to the {place} during the rush.",
                   "It probably got caught in bushes close to the {place} during a picnic.")),
        ("object", ("You will recognise the dent and the bright polish at once.",
                    "You will recognise the knots and the grain at once.",
                    "You will recognise the pattern and the fringe at once.",
                    "You will recognise the signature and the torn page at once.")),
        ("keeper", ("Kindly hand it to {keeper}, who will pass it on to {name}.",
                    "Kindly ring the house of {keeper} and ask for {name}.",
                    "Kindly give it to {keeper}, and {name} will thank you with pie.")),
    )),
    "gift": ("object", (
        "{name} wants to give {friend} a {colour} {object} at {time}. {friend} is {mood} and likes the {animal}. Advise.",
        "What card goes with a {colour} {object} that {name} gives to {friend}, a {mood} person who likes the {animal}, at {time}?",
    ), (
        ("object", ("A {colour} {object} shines best in a box lined with velvet.",
                    "A {colour} {object} looks best with a coat of beeswax.",
                    "A {colour} {object} fits best when rolled up and tied.",
                    "A {colour} {object} travels best between two stiff boards.")),
        ("animal", ("Draw a {animal} with open wings on the front of the card.",
                    "Draw a {animal} among round bubbles on the front of the card.",
                    "Draw a {animal} on a crooked branch on the front of the card.",
                    "Draw a {animal} beside its burrow on the front of the card.")),
        ("mood", ("Then add a joke, because {friend} loves to laugh out loud.",
                  "Then add a medal, because {friend} has earned real honour.",
                  "Then add a lullaby, because {friend} dreams whenever possible.",
                  "Then add a puzzle, because {friend} enjoys hard problems.",
                  "Then add no speech, because {friend} prefers silence.")),
        ("time", ("Knock softly, since {name} arrives before the rooster.",
                  "Knock twice, since {name} arrives when dishes are clattering.",
                  "Knock and whistle, since {name} arrives as the light fades.",
                  "Knock three times, since {name} arrives when all is dark.")),
    )),
}
