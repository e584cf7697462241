"""torchvision's own RetinaNet, harmonized over all images and levels of a batch together. One sees the share of new
pictures whose one object is the best detection, before and after training."""

import torch
from torch.nn.functional import pad
from torchvision.models.detection import anchor_utils, backbone_utils, retinanet
from torchvision.ops import Conv2dNormActivation, box_iou

import ghmdet


class HarmonizedHead(retinanet.RetinaNetHead):  # also for retinanet_resnet50_fpn(head=HarmonizedHead(256, 9, 91))
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        # to the letter (no bound), the few wrongest anchors drown the others while the network knows nothing yet
        self.ghmc, self.ghmr = ghmdet.GHMC(max_weight=30), ghmdet.GHMR(max_weight=30)

    def compute_loss(self, targets, outputs, anchors, matches):  # matches: an object, -1 background, -2 in between
        rows = [match.clamp(min=-1) for match in matches]  # -1 reads the row that pad puts behind the objects
        labels = torch.stack([pad(target["labels"], (0, 1), value=-1)[row] for target, row in zip(targets, rows)])
        boxes = [pad(target["boxes"], (0, 0, 0, 1))[row] for target, row in zip(targets, rows)]
        deltas = torch.stack(self.regression_head.box_coder.encode(boxes, anchors))  # (B, A, 4)
        match = torch.stack(matches)
        ghmc = self.ghmc(outputs["cls_logits"], labels, valid=match != -2)
        ghmr = self.ghmr(outputs["bbox_regression"], deltas, valid=(match >= 0).unsqueeze(2))
        return {"classification": 8 * ghmc, "bbox_regression": 8 * ghmr}


def pictures(count):
    images, targets = list(torch.rand(count, 3, 64, 64)), []
    for image in images:
        corner, size, label = torch.randint(40, (2,)), torch.randint(10, 25, (2,)), torch.randint(3, (1,))
        x0, y0, x1, y1 = torch.cat([corner, corner + size])
        image[label, y0:y1, x0:x1] += 0.5
        targets.append({"boxes": torch.stack([x0, y0, x1, y1]).float().unsqueeze(0), "labels": label})
    return images, targets


def share_found(model, images, targets):
    pairs = zip(model.eval()(images), targets)
    return sum(d["labels"][:1].equal(t["labels"]) and box_iou(d["boxes"][:1], t["boxes"]).item() > 0.5 for d, t in pairs) / len(images)

import os, functools,time
def main(wc=30, wr=30, a=8, b=8, norm=None, lr=2e-3, steps=(50,50,50,50),seed=0):
    torch.manual_seed(seed)
    conv = Conv2dNormActivation
    layers = torch.nn.Sequential(conv(3, 16, stride=2), conv(16, 32, stride=2), conv(32, 32, stride=2), conv(32, 32, stride=2))
    backbone = backbone_utils.BackboneWithFPN(layers, {"2": "0", "3": "1"}, [32, 32], 32)
    anchors = anchor_utils.AnchorGenerator(((12,), (24,), (48,)), ((0.5, 1.0, 2.0),) * 3)
    head = HarmonizedHead(32, 3, 3, norm_layer=norm)
    if wc=="tv": head = retinanet.RetinaNetHead(32,3,3,norm_layer=norm)
    else: head.ghmc.harmonizer.max_weight=wc; head.ghmr.harmonizer.max_weight=wr
    model = retinanet.RetinaNet(backbone, 3, 64, 64, anchor_generator=anchors, head=head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    new = pictures(100)
    out=[share_found(model,*new)]
    t=time.time()
    for n in steps:
        for _ in range(n):
            losses = model.train()(*pictures(8))
            if wc!="tv": losses["classification"]*=a/8;losses["bbox_regression"]*=b/8
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
        out.append(share_found(model, *new))
    print(wc,wr,a,b,lr,out, {k:round(float(v),3) for k,v in losses.items()},round(time.time()-t,1),flush=True)

if __name__ == "__main__":
  gn=functools.partial(torch.nn.GroupNorm,8)
  for norm in (None,gn):
    main("tv",norm=norm)
    for wc,wr in ((None,None),(30,None),(30,30),(10,10),(10,2),(3,2)): main(wc,wr,norm=norm)
