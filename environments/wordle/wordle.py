"""Wordle with its full rules and its own word list: six guesses, and a mark for each letter of a guess."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import verifiers as vf

RULES = """You play Wordle: find a secret English word of five letters. Every guess is answered with one mark a letter:
G: the letter is right and in the right place
Y: the letter is in the word, in another place
-: the letter is not in the word, or not as often as you guessed it"""
GUESS_PROMPT = "\nReply with one guess in <guess> tags, for example <guess>crane</guess>."
THINK_PROMPT = (
    "\nThink inside <think>...</think>, then give one guess in <guess> tags, for example <guess>crane</guess>."
)
HARD_RULE = "\nEvery mark must be used: letters marked G stay where they are, letters marked Y come again."

LENGTH = 5
EVERY_NTH_IS_EVAL = 5

# --- the rules ----------------------------------------------------------------------------------------------------


def marks(secret: str, guess: str) -> str:
    """One mark per letter; a letter is marked at most as often as it occurs in the secret.

    >>> marks("level", "eager"), marks("crane", "crane"), marks("abide", "madam")
    ('Y--G-', 'GGGGG', '-YY--')
    """
    found = ["G" if a == b else "-" for a, b in zip(guess, secret, strict=True)]
    left = Counter(b for a, b in zip(guess, secret, strict=True) if a != b)
    for i, letter in enumerate(guess):
        if found[i] == "-" and left[letter]:
            found[i] = "Y"
            left[letter] -= 1
    return "".join(found)


def breaks_hard_rule(guess: str, before: str, seen: str) -> str | None:
    """The hint from an earlier guess's marks that a guess does not use; None if it uses all."""
    for i, mark in enumerate(seen):
        if mark == "G" and guess[i] != before[i]:
            return f"letter {i + 1} must be {before[i]!r}"
    known = Counter(letter for letter, mark in zip(before, seen, strict=True) if mark != "-")
    missing = known - Counter(guess)
    return f"the word must have {next(iter(missing))!r} in it" if missing else None


@dataclass(frozen=True, slots=True)
class Game:
    """The state of a game after some replies, and the answer to the last one."""

    guesses: tuple[str, ...] = ()
    refused: int = 0
    is_over: bool = False
    said: str = ""


def play(secret: str, info: vf.Info, words: Sequence[str]) -> Game:
    """Play a game with these guesses."""
    game = Game()
    for word in words:
        game = after(game, secret, info, word)
        if game.is_over:
            break
    return game


def after(game: Game, secret: str, info: vf.Info, word: str) -> Game:
    """The game after one more word. A word that the rules refuse costs no guess, but refusals are limited."""
    cause = why_refused(game, secret, info, word)
    if cause is not None:
        refused = game.refused + 1
        is_over = refused > info["max_refused"]
        ending = f" That was one too many; the word was {secret}." if is_over else " Guess again."
        return Game(game.guesses, refused, is_over, f"{cause}.{ending}")
    guesses = (*game.guesses, word)
    left = info["max_guesses"] - len(guesses)
    if word == secret:
        ending = "You found the word."
    elif left:
        ending = f"{left} guess{'es' if left > 1 else ''} left."
    else:
        ending = f"No guesses left; the word was {secret}."
    shown = f"{' '.join(word)}\n{' '.join(marks(secret, word))}\n{ending}"
    return Game(guesses, game.refused, word == secret or not left, shown)


def why_refused(game: Game, secret: str, info: vf.Info, word: str) -> str | None:
    if not word:
        return "There is no guess in <guess> tags"
    if len(word) != LENGTH or not (word.isascii() and word.isalpha()):
        return f"A guess is one word of {LENGTH} letters"
    if word not in WORDS:
        return f"{word!r} is not in the word list"
    if not info["hard_mode"]:
        return None
    broken = (breaks_hard_rule(word, before, marks(secret, before)) for before in game.guesses)
    cause = next((cause for cause in broken if cause is not None), None)
    return cause and f"{word!r} does not use what you know: {cause}"


# --- the environment ----------------------------------------------------------------------------------------------


def read_guess(text: str) -> str:
    """The word in the last ``<guess>`` tags of a reply, in lower case and without brackets; "" if there is none.

    >>> read_guess("Then <guess> [CRANE] </guess>!")
    'crane'
    """
    before, _, _ = text.rpartition("</guess>")
    _, opened, guess = before.rpartition("<guess>")
    return guess.strip().removeprefix("[").removesuffix("]").strip().lower() if opened else ""


def game_of(parser: vf.Parser, completion: vf.Messages, answer: str, info: vf.Info) -> Game:
    """The game in a completion."""
    replies = parser.get_assistant_messages(completion)
    return play(answer, info, [parser.parse_answer([reply]) or "" for reply in replies])


def solved(parser: vf.Parser, completion: vf.Messages, answer: str, info: vf.Info) -> bool:
    """Was the word found?"""
    return answer in game_of(parser, completion, answer, info).guesses


def speed(parser: vf.Parser, completion: vf.Messages, answer: str, info: vf.Info) -> float:
    """1 for a word found by the first guess, less for each further guess; 0 if it was not found."""
    guesses = game_of(parser, completion, answer, info).guesses
    return 1 - (len(guesses) - 1) / info["max_guesses"] if answer in guesses else 0.0


def closeness(parser: vf.Parser, completion: vf.Messages, answer: str, info: vf.Info) -> float:
    """How close the last guess was: 1/5 for each letter in its place, 1/10 for each in another place."""
    guesses = game_of(parser, completion, answer, info).guesses
    given = marks(answer, guesses[-1]) if guesses else ""
    return (given.count("G") + 0.5 * given.count("Y")) / LENGTH


def refused_guesses(parser: vf.Parser, completion: vf.Messages, answer: str, info: vf.Info) -> int:
    """How many replies had no guess that the rules allow."""
    return game_of(parser, completion, answer, info).refused


class WordleEnv(vf.MultiTurnEnv):
    """Answers each guess with its marks, until the word is found or the guesses are used up."""

    def env_response(self, messages: vf.Messages, state: vf.State) -> tuple[str, dict[str, bool]]:
        game = game_of(self.parser, messages[len(state["prompt"]) :], state["answer"], state["info"])
        return game.said, {"completed": game.is_over}


def is_eval_word(word: str) -> bool:
    """Is this word for evaluation or for training? The word itself decides, so none is in both data sets."""
    return zlib.crc32(word.encode()) % EVERY_NTH_IS_EVAL == 0


def make_rows(n: int, info: vf.Info, seed: int, *, is_eval: bool) -> list[vf.Row]:
    """``n`` games; a word repeats only after all have been used."""
    draw = random.Random(f"wordle {seed} {is_eval}")
    words = [word for word in SECRETS if is_eval_word(word) == is_eval]
    secrets: list[str] = []
    while len(secrets) < n:
        secrets += draw.sample(words, len(words))
    question = f"The word is chosen. You have {info['max_guesses']} guesses. What is your first?"
    return [{"question": question, "answer": secret, "info": info} for secret in secrets[:n]]


def load_environment(
    use_think: bool = False,
    num_train_examples: int = 2000,
    num_eval_examples: int = 100,
    max_guesses: int = 6,
    max_refused: int = 3,
    hard_mode: bool = False,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.MultiTurnEnv:
    """Wordle; with ``use_think`` the guess is read after ``</think>`` only."""
    if max_guesses < 1:
        raise ValueError(f"max_guesses must be at least 1, got {max_guesses}")
    if max_refused < 0:
        raise ValueError(f"max_refused must not be negative, got {max_refused}")
    parser = vf.ThinkParser(extract_fn=read_guess) if use_think else vf.MaybeThinkParser(extract_fn=read_guess)
    info = {"max_guesses": max_guesses, "max_refused": max_refused, "hard_mode": hard_mode}
    prompt = RULES + (HARD_RULE if hard_mode else "") + (THINK_PROMPT if use_think else GUESS_PROMPT)
    return WordleEnv(
        dataset=make_rows(num_train_examples, info, seed, is_eval=False),
        eval_dataset=make_rows(num_eval_examples, info, seed, is_eval=True),
        system_prompt=system_prompt or prompt,
        parser=parser,
        rubric=vf.Rubric([solved, speed, closeness, refused_guesses], [0.7, 0.1, 0.2, 0.0], parser=parser),
        max_turns=max_guesses + max_refused + 1,  # never reached, because the game ends before
    )


# --- the words ----------------------------------------------------------------------------------------------------

MAY_BE_SECRET = """
abide abode abort about above abuse acorn acrid actor acute adage adept adieu admit adopt adorn adult affix afoot afoul
after again agent agile aging agony agree ahead aisle alarm album alert alibi alien align alike alive alley allot allow
alloy alone along aloof aloud alpha altar alter amaze amber amend amiss amity among ample amply amuse angel anger angle
angry ankle annex annoy antic anvil aorta apart aphid apple apply apron arbor ardor arena argue arise armed armor aroma
array arrow ashes aside assay asset atlas atone attic audio audit avail avert avoid await awake award aware awful axial
axiom azure bacon badge badly bagel baker banjo barge baron basic basil basin basis batch baton bayou beach beady beard
beast beefy befit began begin begot begun beige being belle belly below bench beret berry bevel binge birch birth bison
black blade blame bland blank blast blaze bleak bleed blend bless blimp blind blink bliss blitz bloat block blond blood
bloom blown blues bluff blunt blurb blurt blush board boast boggy bogus bonny bonus boost booth booze borax bored bossy
botch bough bound bowel boxer brace braid brain brake brand brash brass brave bravo brawl brawn bread break breed briar
bribe brick bride brief brine bring brink briny brisk broad broil broke brood brook broom broth brown brunt brush brute
buddy budge buggy bugle build built bulky bully bumpy bunch bunny burnt burst butte buyer bylaw cabin cable cacao cacti
cadet camel campy canal candy canny canoe canon caper carat cargo carol carry carve caste catch cater caulk cause cease
cedar cello chafe chaff chain chair chalk champ chant chaos charm chart chase chasm cheap cheat check cheek cheer chess
chest chewy chick chief child chili chill chime chirp chive chock choir choke chord chore chose chump chunk churn chute
cider cigar cinch civet civic civil clack claim clamp clang clank clash clasp class clean clear cleat cleft clerk click
cliff climb cling clink cloak clock clone close cloth cloud clout clove clown cluck clump coach coast cobra cocoa colon
color comet comic comma coral cough could count court coven cover covet cower coyly crack craft cramp crane crank crash
crass crate crave crawl crazy creak cream creed creek creep creme crepe crept crest crier crime crimp crisp croak crock
crone crony crook cross croup crowd crown crude cruel cruet crumb crush crust cubic cumin curio curly curry curve cutie
cycle cynic daily dairy daisy dance dandy datum daunt dealt death debar debit debut decay decor decoy deity delay delta
delve demon denim dense depot depth derby deter detox devil diary digit dimly diner dingo dingy dirge dirty ditch ditto
ditty diver dizzy dodge dogma doing dolly donor donut doubt dough dowdy dowel dowry dozen draft drain drama drank drape
drawl drawn dread dream dress dried drift drill drink drive droll drool droop dross drove drown druid dryer dryly dully
dummy dunce dusty dwarf dwell eager eagle early earth easel eaten eater ebony edict edify eerie egret eight eject elate
elbow elder elect elfin elite elope elude email ember emery empty enact endow enemy enjoy ensue enter entry envoy epoch
epoxy equal equip erase error erupt essay ethic ethos evade event every evict evoke exact exalt excel exert exile exist
expel extol extra exude exult fable facet faint fairy faith false fancy fatal fatty fault fauna favor feast feign felon
femur fence feral ferry fetch fetid fever fewer fiber field fiery fifth fifty fight filmy filth final finch first fjord
flail flair flake flaky flame flank flare flash flask fleck fleet flesh flick flies fling flint flirt float flock flood
floor flora floss flour flout flown fluff fluid fluke fluky flung flunk flush flute focal focus foggy folio folly foray
force forge forgo forte forty forum found foyer frail frame frank fraud freak fresh friar fried frill frisk frock frond
front frost froth frown froze fruit fudge fugue fully fungi funny fussy fuzzy gaily gamer gamma gamut gaudy gauge gaunt
gavel gawky gecko geese genie genre ghost ghoul giant giddy girth given giver gizmo glade gland glare glass glaze gleam
glean glide glint gloat globe gloom glory gloss glove glyph gnash gnome godly going goose gorge gourd grace grade grail
grain grand grant grape graph grasp grass grate grave gravy graze great greed green greet grief grill grime grimy grind
gripe grist groan groom grope gross group grove growl grown gruel gruff grunt guard guava guess guest guide guild guile
guilt guise gulch gully gumbo guppy gusto gusty habit haiku hairy handy happy hardy harsh haste hasty hatch haunt haven
havoc hazel heart heavy hedge hefty heist helix hello hence heron hiker hilly hinge hippo hitch hoard hobby hoist homer
honey honor horde horse hotel hotly hound house hover howdy human humid humor humus hurry husky hutch hydra hyena hyper
icing ideal idiom idler idyll igloo image impel imply inane inbox incur index inept inert infer ingot inlay inlet inner
input ionic irate irony islet issue itchy ivory jaunt jazzy jeans jelly jerky jetty jewel jiffy joint joist joker jolly
joust judge juice juicy jumbo juror karma kayak kebab khaki kiosk kitty knack knead kneel knelt knife knock knoll known
koala krill label labor laden ladle lance lanky lapel lapse large larva laser latch later latex lathe laugh layer leafy
leaky leapt learn lease leash least leave ledge leech legal leggy lemon lemur level lever libel liege light liken lilac
limbo limit linen liner lingo lipid lithe liver livid llama loamy loath lobby local locus lodge lofty logic login loopy
loose lorry loser lousy lover lower lowly loyal lucid lucky lumpy lunar lunch lunge lurch lurid lusty lymph lyric macaw
macho madam madly magic magma maize major maker mambo manga mango mania manly manor maple march marry marsh mason match
maven maxim maybe mayor mealy meant medal media melee melon mercy merge merit merry messy metal meter midge midst might
milky mimic mince miner minor minty minus mirth miser misty mixer mocha modal model modem mogul moist molar money month
moody moose moral mossy motel motor motto moult mound mount mourn mouse mouth mover movie mucky mucus muddy mulch mummy
mural murky mushy music musty nadir naive nasty naval needy nerdy nerve never newer nicer niece nifty night ninth noble
nobly noise noisy nomad noose north notch noted novel nudge nurse nutty nylon nymph oaken oasis occur ocean octet oddly
offer often older olive omega onion onset opera opine opium optic orbit order organ other otter ought ounce outdo outer
overt ovoid owner oxide ozone pagan paint paler panda panel panic pansy paper parch parka parry party pasta paste patch
patio patty pause peace peach pearl peaty pecan pedal penal penne penny perch peril perky pesky petal petty phase phone
phony photo piano piece piety piggy pilot pinch pinky pious pique pitch pithy pivot pixel pixie pizza place plaid plain
plane plank plant plate plaza plead pleat plied pluck plumb plume plump plunk plush poise poker polar polka polyp poppy
porch posse potty pouch pound power prank prawn preen press price pride prime primp print prior prism privy prize probe
prong proof prose proud prove prowl proxy prude prune psalm pudgy puffy pulpy pulse punch pupil puppy puree purge purse
quack quail quake quart quash quasi queen quell query quest queue quick quiet quill quilt quirk quite quota quote rabid
radar radio rainy raise rally ramen ranch range rapid raspy ratio raven rayon razor reach react ready realm rebel rebut
recap recur reedy refer regal reign relax relay relic remix renew repay repel reply resin retry reuse revel rhino rhyme
rider ridge rifle right rigid rinse ripen risen risky rival river rivet roach roast robin robot rocky rodeo rogue roomy
roost rotor rouge rough round route rover rowdy royal ruddy rugby ruler rumor rupee rural rusty saint salad salon salsa
salty salve sandy sassy satin sauce saucy sauna saute saved savor savvy scald scale scalp scamp scant scare scarf scary
scene scent scoff scold scone scoop scope score scorn scour scout scowl scram scrap screw scrub scuba sedan seedy seize
sense serif serum serve setup seven sever sewer shack shade shady shaft shake shaky shall shame shape shard share shark
sharp shave shawl shear sheen sheep sheer sheet sheik shelf shell shift shine shiny shirt shoal shock shone shoot shore
shorn short shout shove shown shred shrew shrub shrug shuck shunt shyly siege sieve sight sigma silky silly silty since
sinew singe siren sixth sixty skate skier skiff skill skimp skirt skulk skull skunk slack slain slang slant slash slate
sleek sleep sleet slept slice slick slide slime slimy sling slink slope slosh sloth slump slung slurp slush slyly small
smart smash smear smell smelt smile smirk smith smock smoke smoky snack snail snake snare snarl sneak sneer snide sniff
snipe snoop snore snort snout snowy snuck snuff soapy sober soggy solar solid solve sonic sorry sound south space spade
spare spark spasm spate spawn speak spear speed spell spend spent spice spicy spied spiel spike spiky spill spine spiny
spire spite split spoil spoke spoof spook spool spoon spore sport spout spray spree sprig spurn spurt squad squat squib
squid stack staff stage staid stain stair stake stale stalk stall stamp stand stank stare stark start stash state stead
steak steal steam steed steel steep steer stein stern stick stiff still stilt sting stink stint stock stoic stoke stomp
stone stony stood stool stoop store stork storm story stout stove strap straw stray strip strum strut stuck study stuff
stump stung stunt style suave suede sugar suite sulky sully sumac sunny super surge surly sushi swamp swarm swash swath
swear sweat sweep sweet swell swept swift swine swing swirl swoon swoop sword synth syrup tabby table taboo tacit taffy
taken tally talon tamer tango tangy taper tardy tarot taste tasty taunt taupe tawny teach tease teeth tempo tempt tenet
tenor tense tenth tepee tepid terse thank theft their theme there these theta thick thief thigh thing think third thorn
those three threw throb throw thrum thumb thump thyme tiara tibia tidal tiger tight tilde timer timid tipsy tired titan
tithe title toady toast today toddy token tonic tooth topaz topic torch torso torus total totem touch tough towel tower
toxic toxin trace track tract trade trail train trait tramp trash trawl tread treat trend triad trial tribe trick tried
tripe trite troll troop trope trout truce truck truly trunk truss trust truth tuber tulip tulle tummy tuner tunic turbo
tutor tweak tweed tweet twice twine twirl twist tying udder ulcer ultra umbra uncle under undue unfit unify union unite
unity unlit unset untie until unzip upper upset urban usage usher usual usurp utter vague valid valor value valve vapor
vault vaunt vegan venom venue verge verse verve vicar video vigor villa vinyl viola viper viral virus visit visor vista
vital vivid vixen vocal vodka vogue voice voter vouch vowel wacky wader wafer wagon waist waive waltz warty waste watch
water waver waxen weary weave wedge weigh weird whack whale wharf wheat wheel where which whiff while whine whirl whisk
white whole whoop whose widen widow width wield wince winch windy wiser wispy witch witty woken woman women woody wooly
woozy wordy world wormy worry worse worst worth would wound woven wrack wrath wreak wreck wrest wring wrist write wrong
wrote wrung wryly yacht yearn yeast yield yodel yokel young yours youth yummy zebra zesty zippy zonal
"""
# Words of four letters whose form with -s is a valid guess, and verbs whose forms with -s and -d are.
TAKE_S = """
acid aunt back ball band bank barn bath bead beam bean bear beat bell belt bend bill bird boat bolt bomb bond bone book
boot bowl bulb bull cake call calm camp card cart case cave cell chef chin clam clan clap claw clay clip club clue coal
coat coin cone cook cord core corn cost crab crew crib crop crow cube curb dart deal deck desk dial dice dime disc dock
dome door dove drag draw drip drop drum duck duel duet duke dune edge edit epic exam exit fact fail fall fang farm fate
fear feat feed feel fill film find firm fist flag flap flat flaw flea flip flow foam fold font food fool fork form fort
fowl fuel fund gain game gang gate gear gene germ gift girl give glow goal goat grab gram grid grin grip gulf hair hall
hand hang harm harp hawk head heal heap hear heat heel help herb herd hero hide hill hint hole home hood hoof hook horn
host hour hunt hurt idea idol iron item jail jump keep kick kill king kite knee knob knot lace lack lake lamb lamp land
lane lava lawn lead leak lean lend lift limb lime link lion list load loan lock logo look loop lord lose luck lung mail
make mall mare mark mask mast meal mean meat meet melt menu mile milk mill mind mint mode mole monk mood moon mule nail
neck need nest node norm nose noun oath odor omen oven pack page pain pair palm park part past path peak pear peel peer
pest pick pier pill pine pint pipe plan play plea plot plow plug poem poet pole poll pond pool port post pour pray prey
pump quit raft rain rank read rent rest rice ring riot rise risk road robe rock role roll roof room root rope rose sail
sake sale salt sand scan scar seal seat seed seek sell send ship shoe shop shot show sign sink site skin skip slab slam
slap sled slip slot snap soap sock sofa soil song sort soul soup spin spot star stay stem step stew stir stop suit surf
swan swap swim tail take tale talk tank task taxi team tear tent term test text tide tile toad toll tomb tool tour town
tram trap tray tree trim trip tube tuna turn twig twin unit user vase veil vein vest view vine visa wait walk wall want
warm warn week whip wind wing wink wood wool word work worm wrap yard yarn year yell
"""
TAKE_D = """
bake bore care code cope cure dare date dine dive dose face fade file fire fume fuse gaze glue hate hike hire hope joke
like line live love lure mine move name note pace pave pile pose race rage rate ride rule save side size tame tape time
tire tone tune type urge vote wage wake wave wine wipe wire zone
"""
SECRETS = tuple(MAY_BE_SECRET.split())
WORDS = frozenset(
    [*SECRETS, *(f"{word}s" for word in (TAKE_S + TAKE_D).split()), *(f"{word}d" for word in TAKE_D.split())]
)
