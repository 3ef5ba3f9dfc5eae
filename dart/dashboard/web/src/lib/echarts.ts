/** The parts of ECharts that the dashboard uses. Loaded on its own, once a page has a chart. */
import { BarChart, CustomChart, LineChart } from 'echarts/charts'
import { GridComponent, MarkLineComponent, TooltipComponent } from 'echarts/components'
import { init, use } from 'echarts/core'
import { CanvasRenderer } from 'echarts/renderers'

use([BarChart, CustomChart, LineChart, GridComponent, MarkLineComponent, TooltipComponent, CanvasRenderer])

export { init }
export type { EChartsType } from 'echarts/core'
