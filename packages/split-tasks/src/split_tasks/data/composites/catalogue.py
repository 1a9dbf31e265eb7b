"""Which files of which Debian packages are used, and as what.

Chosen by eye: photographs only (the packages hold drawings and renders too), classes with enough of them, and no
background whose subject is itself of one of the classes (dogs, a fig, whole flowers).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """One Debian package (bookworm), pinned.

    Args:
        name, version: as apt knows it.
        path: below the mirror's debian/pool/main/.
        sha256: of the .deb.
        folder: where its pictures lie inside.
    """

    name: str
    version: str
    path: str
    sha256: str
    folder: str

    @property
    def filename(self) -> str:
        """Name of the .deb in the pool."""
        return self.path.rsplit("/", 1)[-1]


STAMPS = Package(
    "tuxpaint-stamps-default",
    "2022.06.04-1",
    "t/tuxpaint-stamps/tuxpaint-stamps-default_2022.06.04-1_all.deb",
    "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34",
    "usr/share/tuxpaint/stamps",
)
PLASMA = Package(
    "plasma-workspace-wallpapers",
    "4:5.27.5-2",
    "p/plasma-workspace-wallpapers/plasma-workspace-wallpapers_5.27.5-2_all.deb",
    "32cd18b71c8c938a18b3b351f217c02ac590e323caa3cf322fbb875ce8892f8b",
    "usr/share/wallpapers",
)
MATE = Package(
    "mate-backgrounds",
    "1.26.0-1",
    "m/mate-backgrounds/mate-backgrounds_1.26.0-1_all.deb",
    "7bf4c2209f34b4f61ba6d24c8b58c28b361e82e4b943aae6d42c030169af9e04",
    "usr/share/backgrounds/mate",
)
LOMIRI = Package(
    "lomiri-wallpapers-16.04",
    "20.04.0-2",
    "l/lomiri-wallpapers/lomiri-wallpapers-16.04_20.04.0-2_all.deb",
    "a99ff6a3bfe451e4cc0682ecb3cc82e71740626d59e4845ae34a0a0e45421eab",
    "usr/share/backgrounds",
)
PACKAGES = (STAMPS, PLASMA, MATE, LOMIRI)

CUTOUTS: dict[str, dict[str, str]] = {
    "bird": {
        "animals/birds": "adelaide-rosella albino_peahen blackbird chicken_profile crow crowned_crane cuckoo drake "
        "duck gander guineafowl helmeted_guineafowl hen heron_greatblue heron_greatblue_flying lark little-penguin "
        "magellanic_penguin magpie nandou ostrich owl peacock pelican penguin pigeon pink_flamingo quetzal "
        "rainbow-lorikeet rooster seagull silver-gull tucan turkey vulture"
    },
    "sea animal": {
        "animals/fish": "bluegroper butterflyfish clownfish coraltrout dolphinfish lionfish lobster moonwrasse "
        "seahorse shrimp stripedfish",
        "animals/mammals/aquatic": "dolphin orca sea_lion whale",
    },
    "hoofed animal": {
        "animals/mammals/bovines": "bison bull cow cow_white gnu-baby-stand gnu-baby gnu-sitting gnu-stand goat "
        "indian_blackbuck mountaingoat ram sheep sheep_lamb yak zebu",
        "animals/mammals/camel": "camel dromedary",
        "animals/mammals/deer": "caribou deer doe wapiti",
        "animals/mammals/equines": "donkey donkey_eating horse zebra",
        "animals/mammals": "giraffe hippopotamus pig pig_golden pig_golden2 rhino_black wildboar",
    },
    "carnivore": {
        "animals/mammals/cats": "lion-2 lion tiger tiger_sumatran",
        "animals/mammals/dogs": "dingo dog fox",
        "animals/mammals/bears": "bear european-bear",
        "animals/mammals/aquatic": "otter",
        "animals/mammals": "badger ferret",
    },
    "small mammal": {
        "animals/mammals/rodents": "beaver capybara marmot mouse rabbit-2 rabbit rat squirrel",
        "animals/mammals": "rabbit_little",
        "animals/marsupials": "koala wombat",
    },
    "fruit": {
        "food/fruit": "Apricot_whole Cherry_Stella Strawberry2 apple_fuji apple_granny_smith apple_green apple_red "
        "apple_sierra_beauty apricot avocado banana cherimoya grapes kiwi lemon mandarine mango orange orange_seville "
        "pear pineapple pomegranate raspberry sliced_lime sliced_orange strawberry"
    },
    "vegetable": {
        "food/vegetables": "broccoli carrot chilepepper corn eggplant garlic garlics lettuce mushroom onion "
        "pattypan_squash pepper potato pumpkin_small redlettuce tomato yam yellowpepper",
        "food/spices": "ginger",
    },
    "flower": {
        "plants/flowers": "adeenia anemone_red anthoorium appooppanthady bolsom chemparathi daffodil flower1 flower10 "
        "flower2 flower3 flower4 flower5 flower6 flower7 flower8 flower9 iris marigold pigface red-gazania rose "
        "whitestar-petunia yellow-flower",
        "plants/flowers/plastic": "chuvanna_plastic_poo",
    },
    "instrument": {
        "hobbies/music/brass": "trumpet",
        "hobbies/music/percussion": "cymbal_crash drum_tomtom_floor drumkit",
        "hobbies/music/string": "cello guitar2 guitar_classical guitar_electric guitar_electric_bass violin",
    },
    "tool": {
        "household/tools": "hammer mallet_metal measuring_tape paintbrush_large plyers saw spade toolbox wrench "
        "wrench_adjustable wrench_plumbers",
        "household/arttools": "scissors_small_closed scissors_small_open",
    },
    "vehicle": {
        "vehicles/auto": "beetle sedan sportscar2 truck",
        "vehicles/construction": "dumper",
        "vehicles/cycle": "pink_tricycle",
        "vehicles/emergency": "firetruck",
        "vehicles/flight/planes": "747",
        "vehicles": "garbagetruck",
        "vehicles/masstransit": "green_korean_bus",
        "vehicles/race": "indycar",
        "vehicles/ship": "chineseJunk walnutBoat",
        "military/vehicles": "bradley f22_raptor infantry-stryker",
    },
    "planet": {
        "space/planets": "1_mercury 2_venus 3_earth 4_mars 5_jupiter 6_saturn 7_uranus 8_neptune 9_pluto",
        "space/moon": "moon_3qt moon_full",
    },
    "gravestone": {
        "seasonal/halloween": "grave-a grave-b grave-c grave-d grave-e grave-f grave-g grave-h grave-i grave-j",
    },
}
"""Class -> folder in STAMPS -> names of its .png files."""

PHOTOGRAPHS: dict[str, tuple[str, str]] = {
    PLASMA.name: (
        "{}/contents/images/2560x1600.jpg",
        "BytheWater ColdRipple ColorfulCups DarkestHour EveningGlow FallenLeaf Grey Kite OneStandsOut Path summer_1am",
    ),
    MATE.name: (
        "nature/{}.jpg",
        "Aqua Blinds Dune FreshFlower GreenMeadow LadyBird RainDrops Storm TwoWings Wood",
    ),
    LOMIRI.name: (
        "{}.jpg",
        "Bridge_by_Sander_Klootwijk Dragonfly_by_Bolly Picture_1A_by_freespace "
        "Wine_by_Jakkub_Mede aitzgorri_by_Aitzol_Berasategi analogpattern_by_Peter_Nerlich free_by_Peter_Nerlich "
        "greentock_by_Peter_Nerlich life_by_Aitzol_Berasategi "
        "picosdeeuropa_by_Aitzol_Berasategi seeding_by_Clements_Engelhardt sunset_by_Aitzol_Berasategi",
    ),
}
"""Package -> path of its photographs below its folder, and their names."""
